"""What the stability monitors cost: training steps with and without them, alternately.

    OMP_NUM_THREADS=2 python benchmarks/monitor.py [--quick] [--interval 10]

A step is forward and backward of `--micro-batches` micro-batches, gradient reduction and Megatron's metric
report with a TensorBoard writer, in FP32 with batch 1 on the CPU. No optimizer runs; with one the monitors'
share would be smaller. Three models with the same weights take turns, each in its own process: monitors off,
measuring at every step, and on but between two measurements. The cost at interval n is
(measured + (n - 1) * between) / n.

Times are CPU seconds of all threads of the process, so that other work on the machine adds little. The
remaining noise hides differences of 1 %. So the time inside the monitors' own code is added up as well
("inside"); on a CPU none of it runs asynchronously. The limit of 1 % applies to this figure.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from typing import Any

from common import Worker, in_turn, machine, model, print_table

LENGTHS = (512, 2048, 8192)
#: Interval of each side; the last measures its first step and then none.
SIDES = {"off": 0, "measured": 1, "between": 10**9}
LIMIT = 0.01


class Training:
    """A model that trains, and a clock inside the monitors."""

    def __init__(self, interval: int, micro_batches: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
        from torch.utils.tensorboard import SummaryWriter

        from megatron_nemotron3.train.monitor.settings import monitoring
        from tests.support.model_mapping import megatron_model, randomize
        from tests.support.world import world_of_one

        self.inside = 0.0
        if interval:
            self._put_clocks()
        self.config, self.micro_batches = model(), micro_batches
        self._stack = ExitStack()
        self._stack.enter_context(world_of_one())
        with monitoring(interval):
            built = megatron_model(self.config).train()
        randomize(built, seed=6)
        self.ddp: Any = DistributedDataParallel(built.config, DistributedDataParallelConfig(), built)
        self.tracker = get_moe_metrics_tracker()
        self.writer = SummaryWriter(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.iteration = 0
        for _ in range(2):
            self.step(64)

    def _put_clocks(self) -> None:
        """Around every hook, before any is registered, and around the report."""
        from megatron_nemotron3.train.monitor.attach import Monitor
        from megatron_nemotron3.train.monitor.watched import WatchedLayer, WatchedLoss

        def clocked(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                start = time.process_time()
                try:
                    return function(*args, **kwargs)
                finally:
                    self.inside += time.process_time() - start

            return call

        hooks = ("_on_layer", "_on_latent", "_on_router")
        for owner, names in ((WatchedLayer, hooks), (WatchedLoss, ("_on_model",)), (Monitor, ("report",))):
            for name in names:
                setattr(owner, name, clocked(getattr(owner, name)))

    def step(self, length: int) -> float:
        """CPU seconds of one step."""
        import torch
        from megatron.core.distributed import finalize_model_grads

        generator = torch.Generator().manual_seed(length)
        stream = torch.randint(self.config.vocab_size, (1, length + 1), generator=generator)
        tokens, labels = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
        positions = torch.arange(length).unsqueeze(0)
        self.iteration += 1

        start = time.process_time()
        self.ddp.zero_grad_buffer()
        for _ in range(self.micro_batches):
            self.ddp(tokens, positions, None, labels=labels).mean().backward()
        finalize_model_grads([self.ddp])
        self.tracker.report(
            1 / self.micro_batches,
            self.iteration,
            writer=self.writer,
            track_names=[],
            num_layers=self.config.num_layers,
        )
        return time.process_time() - start

    def share(self, length: int, repetitions: int) -> tuple[float, float]:
        """CPU seconds (per step, of it inside the monitors), means over some steps."""
        self.inside = 0.0
        total = sum(self.step(length) for _ in range(repetitions))
        return total / repetitions, self.inside / repetitions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="lengths 512 and 2048, three repetitions")
    parser.add_argument(
        "--interval", type=int, default=10, help="default 10, the least NEMOTRON3_MONITOR defaults to"
    )
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=None)
    args = parser.parse_args()
    repetitions = args.repetitions or (3 if args.quick else 7)
    print(machine(), flush=True)
    workers = {name: Worker(Training, interval, args.micro_batches) for name, interval in SIDES.items()}
    rows, over = [], []
    n = args.interval
    for length in LENGTHS[:2] if args.quick else LENGTHS:
        sides = [lambda w=worker, s=length: w.call("step", s) for worker in workers.values()]
        off, measured, between = in_turn(sides, repetitions)
        whole = (measured + (n - 1) * between) / n / off - 1
        shares = [workers[name].call("share", length, repetitions) for name in ("measured", "between")]
        (step_on, on), (step_idle, idle) = shares
        inside = (on / step_on + (n - 1) * idle / step_idle) / n
        if inside > LIMIT:
            over.append(length)
        ms = [f"{1e3 * t:,.1f}" for t in (off, measured, between)]
        parts = [f"{1e3 * on:.2f}", f"{1e3 * idle:.2f}"]
        rows.append([str(length), *ms, f"{100 * whole:+.2f} %", *parts, f"{100 * inside:.3f} %"])
    for worker in workers.values():
        worker.close()
    header = ["tokens", "off ms", "measured ms", "between ms", f"steps, interval {n}"]
    print_table([*header, "inside ms, measured", "between", f"inside, interval {n}"], rows)
    if over:
        raise SystemExit(f"more than {100 * LIMIT:.0f} % at {over} tokens")


if __name__ == "__main__":
    main()
