"""Forward and backward of a whole model: our torch layers against transformers' NemotronHForCausalLM.

    OMP_NUM_THREADS=2 python benchmarks/train_step.py [--quick]
    OMP_NUM_THREADS=1 python benchmarks/train_step.py --limit
    python benchmarks/train_step.py --width nano --device cuda         # a stage of gpu.py

Same weights, same tokens, FP32, batch 1, on the CPU; the logits must agree before anything is timed. Each
side runs in a process of its own; they take turns, and the medians are compared. Peak memory is the increase
of resident memory over the idle model during one step (activations and gradients, without weights).
transformers runs with SDPA attention and the fastest of its expert implementations (sides.py). Our side is
Megatron's stock HybridModel in training mode, with the load-balancing loss that transformers lacks. Where our
layers compute dense products by oneDNN (`cpu/products.py`), transformers takes torch's library.

--limit: CPU time of our step on one thread, against what its own matrix products (dense layers, router,
experts) and attention take in steps of the same run. The products of the scan are a choice of algorithm, so
they stand apart. One thread and CPU time make the result robust against other load on the machine.

With --device cuda, a stage of gpu.py: a stack with the widths of Nano or Super and the first 8 to 12 layers
of its pattern (models.py), in BF16 with 8,192 tokens. Sides run one after the other: transformers, our
layers, the stock TransformerEngine spec, and our layers with mamba-ssm's scan. A side whose logits differ by
more than two BF16 implementations may is marked, and its speed means nothing; gradients are compared by
`pytest -m gpu` (tests/gpu/test_model.py). Last the operations that take most of the time of our layers.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from common import GIB, MIB, Worker, emit, in_turn, machine, model, parser, seconds, show, table
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
#: On a GPU: tokens, those for which logits are compared, and rows of the profile.
TOKENS, COMPARED_TOKENS, OPERATIONS = 8192, 1024, 20
SMALL_TOKENS = 48
#: Largest distance of logits of two sides in BF16, relative, by norm: 4 eps. The root mean square error of
#: one rounding is 0.21 eps (eps / sqrt(12) where the significand is 1, half of it just below 2). A layer
#: rounds about 9 times between its input and the residual stream, and squares of independent errors add: for
#: 12 layers 0.21 eps * sqrt(9 * 12) = 2.2 eps per side, 3.1 eps between two.
LOGITS_RTOL = 4 * 2.0**-7
TITLES = {
    "hf": "transformers at its best setting",
    "plain": "torch backend without mamba-ssm",
    "te": "stock TransformerEngine spec",
    "mamba-ssm": "torch backend with mamba-ssm's scan",
}


def side(name: str, device: str = "cpu", dtype: str = "float32", config: Any = None) -> Any:
    """A side, by default on the CPU with the benchmarks' model."""
    from sides import SIDES

    made = SIDES[name](device, dtype)
    made.build(config or model())
    return made


def compare(ours: Worker, theirs: Worker, lengths: Sequence[int], repetitions: int) -> None:
    """Print both sides at each length; of transformers only what fits."""
    import numpy as np

    rows: list[dict[str, Any]] = []
    per_token = 0.0  # of the other side's peak, to predict what does not fit
    for length in lengths:
        if per_token * length > MEMORY_SHARE * proc_bytes("meminfo")["MemAvailable"]:
            print(f"{length} tokens: transformers needs about {per_token * length / MIB:,.0f} MiB")
            break
        # Before timing, both sides must give the same logits.
        difference = float(np.abs(ours.call("logits", length) - theirs.call("logits", length)).max())
        if difference > LOGITS_ATOL:
            print(f"logits differ by {difference:.2g} at {length} tokens: limit {LOGITS_ATOL}", flush=True)
            if length == lengths[0]:
                raise SystemExit(1)
        mine, other = (worker.call("peak", length)[0] for worker in (ours, theirs))
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


def on_gpu(width: str, device: str, small: bool) -> None:
    """Measure every side that runs here, one after the other."""
    import models
    import numpy as np
    import torch

    config = models.stack(width, tiny=small)
    fitted = config if small else models.fitting(config, models.capacity(device))
    tokens = SMALL_TOKENS if small else TOKENS
    about = models.described(fitted, config, tokens)
    print(about, flush=True)
    emit("model", {"model": about})
    flops = tokens * sum(models.flops_per_token(fitted, tokens).values()) / 1e12
    n = 256 if small else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * n**3 / min(seconds(lambda: a @ b, device) for _ in range(10)) / 1e12
    peak = models.data_sheet(device)
    expected, theirs, rows = None, None, []
    for name, title in TITLES.items():
        worker = Worker(side, name, device, "bfloat16", fitted)
        row: dict[str, Any] = {"side": title}
        rows.append(row)
        try:
            row["settings"] = worker.call("settings")
            logits = worker.call("logits", min(tokens, COMPARED_TOKENS))
            expected = logits if expected is None else expected
            distance = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
            for _ in range(2):  # kernels are compiled and chosen
                took = worker.call("step", tokens)
            most, held = worker.call("peak", tokens)
            theirs = theirs or took
            row |= {
                "tok/s": round(tokens / took),
                "ms": 1e3 * took,
                "of the first": f"{theirs / took:.2f}",
                "MFU %": 100 * flops / took / peak if peak else None,
                f"of {rate:,.3g} TFLOP/s measured": f"{100 * flops / took / rate:.1f} %",
                "peak GiB": most / GIB,
                "activations GiB": held / GIB,
                "waits": worker.call("waits", tokens),
                "logits": f"{distance:.1e} " + ("agree" if distance <= LOGITS_RTOL else "**differ**"),
            }
            profile = worker.call("profile", tokens, OPERATIONS) if name == "plain" else []
        except RuntimeError as error:
            row["settings"], profile = f"{error}"[:300], []
        worker.close()
        emit("side", row)
        for operation in profile:
            emit("operation", operation)
    print("\n".join(f"- {row['side']}: {row.pop('settings')}" for row in rows))
    print("\n".join(table(row for row in rows if len(row) > 1)))


def main() -> None:
    options = parser(__doc__, gpu=True)
    options.add_argument("--quick", action="store_true", help="lengths 512 and 2048, three repetitions")
    options.add_argument("--lengths", type=int, nargs="+", default=None, help=f"default: {LENGTHS}")
    options.add_argument("--repetitions", type=int, default=None)
    options.add_argument("--limit", action="store_true", help="our step against its own products")
    options.add_argument("--width", choices=("nano", "super"), default="nano", help="on a GPU")
    args = options.parse_args()
    lengths = args.lengths or (LENGTHS[:2] if args.quick else LENGTHS)
    repetitions = args.repetitions or (3 if args.quick else 5)
    print(machine(), flush=True)
    if args.device == "cuda" or args.small:
        on_gpu(args.width, args.device, args.small)
    elif args.limit:
        against_limit(lengths, repetitions)
    else:
        compare(Worker(side, "plain"), Worker(side, "hf"), lengths, repetitions)


if __name__ == "__main__":
    main()
