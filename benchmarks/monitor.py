"""What the stability monitors cost: training steps with and without them, alternately.

    OMP_NUM_THREADS=2 python benchmarks/monitor.py [--quick] [--interval 10]

A step is forward and backward of two micro-batches, gradient reduction and Megatron's metric report with a
TensorBoard writer, in FP32 with batch 1 on the CPU. No optimizer runs; with one the monitors' share would be
smaller. Three models with the same weights take turns, each in its own process: monitors off, measuring at
every step, and on but between two measurements. The cost at interval n is (measured + (n - 1) * between) / n.

Times are CPU seconds of all threads of the process, so that other work on the machine adds little. The
remaining noise hides differences of 1 %. So the time inside the monitors' own code is added up as well
("inside"); on a CPU none of it runs asynchronously. The limit of 1 % applies to this figure.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from common import Worker, machine, model, parser, rounds, show
from sides import Ours

LENGTHS = (512, 2048, 8192)
MICRO_BATCHES = 2
#: Interval of each side; the last measures its first step and then none.
SIDES = {"off": 0, "measured": 1, "between": 10**9}
LIMIT = 0.01


class Training(Ours):
    """A model that trains, and a clock inside the monitors."""

    def __init__(self, interval: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
        from torch.utils.tensorboard import SummaryWriter

        from megatron_nemotron3.train.monitor.settings import monitoring

        super().__init__("cpu", "float32")
        self.inside = 0.0
        if interval:
            self._put_clocks()
        with monitoring(interval):
            self.build(model())
        settings = DistributedDataParallelConfig()
        self.ddp: Any = DistributedDataParallel(self.module.config, settings, self.module)
        self.tracker = get_moe_metrics_tracker()
        self.writer = SummaryWriter(tempfile.mkdtemp())
        self.iteration = 0
        for _ in range(2):
            self.shares(64)

    def probe(self) -> None:
        """No step before the first one with a report, which the monitors measure."""

    def _put_clocks(self) -> None:
        """Around every hook, before any is registered, and around the report."""
        from megatron_nemotron3.train.monitor.attach import Monitor
        from megatron_nemotron3.train.monitor.updates import WatchedUpdates
        from megatron_nemotron3.train.monitor.watched import WatchedLayer, WatchedLoss

        def clocked(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                start = time.process_time()
                try:
                    return function(*args, **kwargs)
                finally:
                    self.inside += time.process_time() - start

            return call

        hooks = {
            WatchedLayer: ("_on_layer", "_on_latent", "_on_router"),
            WatchedLoss: ("_on_model",),
            WatchedUpdates: ("_on_forward",),
            Monitor: ("report",),
        }
        for owner, names in hooks.items():
            for name in names:
                setattr(owner, name, clocked(getattr(owner, name)))

    def shares(self, length: int) -> tuple[float, float]:
        """CPU seconds of one step, and of it inside the monitors."""
        import torch
        from megatron.core.distributed import finalize_model_grads

        tokens, labels = self.batch(length)
        positions = torch.arange(length).unsqueeze(0)
        self.iteration += 1
        self.inside, start = 0.0, time.process_time()
        self.ddp.zero_grad_buffer()
        for _ in range(MICRO_BATCHES):
            self.ddp(tokens, positions, None, labels=labels).mean().backward()
        finalize_model_grads([self.ddp])
        self.tracker.report(
            1 / MICRO_BATCHES,
            self.iteration,
            writer=self.writer,
            track_names=[],
            num_layers=self.config.num_layers,
        )
        return time.process_time() - start, self.inside


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="lengths 512 and 2048, three repetitions")
    options.add_argument(
        "--interval", type=int, default=10, help="default 10, the least NEMOTRON3_MONITOR defaults to"
    )
    options.add_argument("--lengths", type=int, nargs="+", default=None)
    options.add_argument("--repetitions", type=int, default=None)
    args = options.parse_args()
    print(machine(), flush=True)
    workers = [Worker(Training, interval) for interval in SIDES.values()]
    rows, n = [], args.interval
    for length in args.lengths or LENGTHS[: 2 if args.quick else None]:
        calls = [lambda w=worker, s=length: w.call("shares", s) for worker in workers]
        runs = rounds(calls, args.repetitions or (3 if args.quick else 7))
        off, measured, between = (statistics.median(step for step, _ in run) for run in runs)
        spent = [sum(inside for _, inside in run) / sum(step for step, _ in run) for run in runs]
        whole, inside = ((a + (n - 1) * b) / n for a, b in ((measured, between), spent[1:]))
        rows.append(
            {
                "tokens": length,
                "off ms": f"{1e3 * off:,.1f}",
                "measured ms": f"{1e3 * measured:,.1f}",
                "between ms": f"{1e3 * between:,.1f}",
                f"steps, interval {n}": f"{100 * (whole / off - 1):+.2f} %",
                f"inside, interval {n}": f"{100 * inside:.3f} %",
            }
        )
        if inside > LIMIT:
            raise SystemExit(f"more than {100 * LIMIT:.0f} % at {length} tokens: {100 * inside:.3f} %")
    show(rows)


if __name__ == "__main__":
    main()
