"""Forward and backward of a whole model: our torch layers against transformers' NemotronHForCausalLM.

    OMP_NUM_THREADS=2 python benchmarks/train_step.py [--quick]
    OMP_NUM_THREADS=1 python benchmarks/train_step.py --limit
    python benchmarks/train_step.py --side te --width nano --device cuda      # a stage of gpu.py

Same weights, same tokens, FP32, batch 1, on the CPU; the logits must agree before anything is timed. Each
side runs in a process of its own; they take turns, and the medians are compared. Peak memory is the increase
of resident memory over the idle model during one step (activations and gradients, without weights).
transformers runs with SDPA attention and the fastest of its expert implementations (sides.py). Our side is
Megatron's stock HybridModel in training mode, with the load-balancing loss that transformers lacks. Where our
layers compute dense products by oneDNN (`cpu/products.py`), transformers takes torch's library.

--limit: CPU time of our step on one thread, against what its own matrix products (dense layers, router,
experts) and attention take in steps of the same run. The products of the scan are a choice of algorithm, so
they stand apart. One thread and CPU time make the result robust against other load on the machine.

--side: one side alone, a stack with the widths of Nano or Super and the first 8 to 12 layers of its pattern
(models.py), in BF16 with 8,192 tokens. First sketches of logits and gradients, by which gpu.py compares sides
that ran at different times; then time, memory and host waits; last the operations that take most of the time.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from common import MIB, Worker, emit, in_turn, machine, model, parser, show
from process_tree import proc_bytes

LENGTHS = (512, 2048, 8192)
#: Largest difference of logits.
LOGITS_ATOL = 1e-3
#: Share of the available memory that a step may use.
MEMORY_SHARE = 0.8
#: Operations of torch that are matrix products, and those that are attention.
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "_linear_pointwise"}
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
#: Of --side: tokens, those for which logits and gradients are compared, steps, and rows of the profile.
TOKENS, COMPARED_TOKENS, STEPS, OPERATIONS = 8192, 1024, 8, 20
SMALL_TOKENS = 48


def side(name: str, dtype: str = "float32") -> Any:
    """A side on the CPU, with the benchmarks' model."""
    from sides import SIDES

    made = SIDES[name]("cpu", dtype)
    made.build(model())
    return made


def compare(ours: Worker, theirs: Worker, lengths: Sequence[int], repetitions: int) -> None:
    """Print both sides at each length; of transformers only what fits."""
    import numpy as np

    rows: list[dict[str, Any]] = []
    per_token = 0.0  # of the other side's peak, to predict what does not fit
    for length in lengths:
        mine = ours.call("peak", length)
        if per_token * length > MEMORY_SHARE * proc_bytes("meminfo")["MemAvailable"]:
            print(f"{length} tokens: transformers needs about {per_token * length / MIB:,.0f} MiB")
            measure(ours, [length], repetitions)
            continue
        # Before timing, both sides must give the same logits.
        difference = float(np.abs(ours.call("logits", length) - theirs.call("logits", length)).max())
        if difference > LOGITS_ATOL:
            print(f"logits differ by {difference:.2g} at {length} tokens: limit {LOGITS_ATOL}", flush=True)
            if length == lengths[0]:
                raise SystemExit(1)
        other = theirs.call("peak", length)
        per_token = other / length
        a, b = in_turn([lambda s=length, w=w: w.call("step", s) for w in (ours, theirs)], repetitions)
        rows.append(
            {
                "tokens": length,
                "ours tok/s": round(length / a),
                "HF tok/s": round(length / b),
                "ratio": f"{b / a:.2f}",
                "ours peak MiB": round(mine / MIB),
                "HF peak MiB": round(other / MIB),
                "peak ratio": f"{mine / other:.2f}",
                "logits diff": f"{difference:.1e}",
            }
        )
        print(f"  {length} tokens done", flush=True)
    show(rows)


def measure(ours: Worker, lengths: Sequence[int], repetitions: int) -> None:
    """Print our side alone."""
    rows = []
    for length in lengths:
        (seconds,) = in_turn([lambda s=length: ours.call("step", s)], repetitions)
        held = round(ours.call("peak", length) / MIB)
        rows.append({"tokens": length, "ours tok/s": round(length / seconds), "ours peak MiB": held})
    show(rows)


class Clock:
    """CPU seconds of matrix products and attention, and of the products inside the scan."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        from megatron_nemotron3.layers.chunked_scan import ChunkedScan

        clock, self.inside = self, False
        self.seconds: dict[str, float] = defaultdict(float)
        for name in ("forward", "backward"):
            setattr(ChunkedScan, name, staticmethod(self._marked(getattr(ChunkedScan, name))))

        class Timed(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                start = time.thread_time()
                result = func(*args, **(kwargs or {}))
                name = func.__name__.split(".")[0]
                if name in PRODUCTS | ATTENTION:
                    clock.seconds["scan" if clock.inside else "limit"] += time.thread_time() - start
                return result

        self.mode = Timed

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False

        return call


def against_limit(lengths: Sequence[int], repetitions: int) -> None:
    """Print CPU time of our step beside its limit; both kinds of steps take turns."""
    import torch

    torch.set_num_threads(1)
    ours, clock, rows = side("plain"), Clock(), []
    for length in lengths:
        found: dict[str, list[float]] = defaultdict(list)
        ours.step(length)
        for _ in range(repetitions):
            start = time.process_time()
            ours.step(length)
            found["step"].append(time.process_time() - start)
            clock.seconds.clear()
            with clock.mode():
                ours.step(length)
            for name, value in clock.seconds.items():
                found[name].append(value)
        step, limit, scan = (1e3 * statistics.median(found[name]) for name in ("step", "limit", "scan"))
        rows.append(
            {
                "tokens": length,
                "step, CPU ms": f"{step:,.1f}",
                "limit": f"{limit:,.1f}",
                "products of the scan": f"{scan:,.1f}",
                "step / limit": f"{step / limit:.2f}",
                "step / (limit + scan)": f"{step / (limit + scan):.2f}",
            }
        )
    show(rows)


def alone(name: str, width: str, device: str, small: bool) -> None:
    """Measure one side."""
    import models
    from sides import SIDES

    from megatron_nemotron3.models.parameters import count

    made = SIDES[name](device)
    config = models.stack(width, tiny=small)
    fitted = config if small else models.fitting(config, models.capacity(device))
    tokens = SMALL_TOKENS if small else TOKENS
    about = {
        "title": fitted.title,
        "pattern": fitted.pattern,
        "experts": fitted.num_moe_experts,
        "published_experts": config.num_moe_experts,
        "topk": fitted.moe_router_topk,
        "parameters": count(fitted).stored,
        "tokens": tokens,
        "flops_per_token": sum(models.flops_per_token(fitted, tokens).values()),
    }
    emit("model", about)
    emit("settings", {"text": made.build(fitted)})
    emit("parity", made.parity(min(tokens, COMPARED_TOKENS)))
    emit("speed", made.measure(tokens, 1 if small else STEPS))
    show(made.profile(tokens, OPERATIONS), "profile")


def main() -> None:
    options = parser(__doc__, gpu=True)
    options.add_argument("--quick", action="store_true", help="lengths 512 and 2048, three repetitions")
    options.add_argument("--lengths", type=int, nargs="+", default=None, help=f"default: {LENGTHS}")
    options.add_argument("--repetitions", type=int, default=None)
    options.add_argument("--ours-only", action="store_true", help="do not run transformers")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of --ours-only")
    options.add_argument("--limit", action="store_true", help="our step against its own products")
    options.add_argument("--side", choices=("plain", "mamba-ssm", "hf", "te"), help="this one alone")
    options.add_argument("--width", choices=("nano", "super"), default="nano", help="of --side")
    args = options.parse_args()
    lengths = args.lengths or (LENGTHS[:2] if args.quick else LENGTHS)
    repetitions = args.repetitions or (3 if args.quick else 5)
    print(machine(), flush=True)
    if args.side:
        alone(args.side, args.width, args.device, args.small)
    elif args.limit:
        against_limit(lengths, repetitions)
    elif args.ours_only or args.dtype != "float32":
        measure(Worker(side, "plain", args.dtype), lengths, repetitions)
    else:
        compare(Worker(side, "plain"), Worker(side, "hf"), lengths, repetitions)


if __name__ == "__main__":
    main()
