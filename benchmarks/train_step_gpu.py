"""Forward and backward at published width on one GPU: our torch spec, transformers and the stock TE spec.

    python benchmarks/train_step_gpu.py                        # both widths, every side that can run
    python benchmarks/train_step_gpu.py --widths nano --sides ours-kernels ours-plain --profile 15
    python benchmarks/train_step_gpu.py --device cpu --tiny    # the same code on small models

The models have the widths of Nano and Super and the first 8 to 12 layers of their patterns (the length whose
shares of M, * and E are closest to the published ones). BF16, 8,192 tokens, micro-batch 1, no optimizer.
Every side is a process of its own with the same weights. The sides take turns and hold device memory only in
their turn. Before anything is timed, logits are compared with pinned routing (`gpu_weights.fill`), because
BF16 rounding could otherwise swap nearly equal experts. Timed steps route by scores alone.

tok/s    tokens per second of the median step, by CUDA events
MFU      model FLOPs (`gpu_model.flops_per_token`) relative to --peak-tflops
peak     peak allocation of a step minus that of the idle model; includes gradients, but not weights
waits    how often a step makes the host wait for the device (`gpu_world.host_waits`)
logits   |difference| / |logits| (norms) relative to the first transformers side, or to the first side
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import suppress
from typing import Any

from common import Worker, machine, parser, print_table
from gpu_model import fitting, flops_per_token, stack
from gpu_side import VOCABULARY_STRIDE
from gpu_sides import SIDES

WIDTHS = ("nano", "super")
#: Dense BF16 peak of an H200 SXM, in TFLOP/s (NVIDIA's data sheet of the H200).
PEAK_TFLOPS = 989.0
TOKENS, TINY_TOKENS = 8192, 160
#: Tokens for which logits are compared.
COMPARED_TOKENS = 1024
#: For two sides in BF16, eps = 2^-7. The root mean square error of one rounding is 0.21 eps (eps / sqrt(12)
#: where the significand is 1, half of it just below 2). A layer rounds about 9 times between its input and
#: the residual stream, and squares of independent errors add: for 12 layers 0.21 eps * sqrt(9 * 12) = 2.2 eps
#: per side, 3.1 eps between two.
LOGITS_TOLERANCE = 4 * 2.0**-7
GIB = 2**30


def main() -> int:
    args = arguments()
    if args.device == "cpu" and not args.tiny:
        print("--device cpu runs small models only: add --tiny", file=sys.stderr)
        return 2
    if args.device == "cuda" and not has_cuda():
        print("no CUDA device here: run this on a GPU, or add --device cpu --tiny", file=sys.stderr)
        return 2
    print(machine() + (f", {device_name()}" if args.device == "cuda" else ""), flush=True)
    deadline = time.monotonic() + args.time_limit
    workers = {name: Worker(SIDES[name], args.device) for name in args.sides}
    try:
        fine = [run_width(width, workers, args, deadline) for width in args.widths]
    finally:
        for worker in workers.values():
            worker.close()
    return 0 if all(fine) else 1


def arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--tiny", action="store_true", help="the models' tiny forms at 160 tokens")
    arguments.add_argument("--widths", nargs="+", choices=WIDTHS, default=WIDTHS)
    arguments.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES))
    arguments.add_argument("--tokens", type=int, default=None, help=f"default: {TOKENS}")
    arguments.add_argument("--rounds", type=int, default=2, help="turns of each side (default: 2)")
    arguments.add_argument("--steps", type=int, default=5, help="timed steps per turn (default: 5)")
    arguments.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help="default: 989 (H200)")
    arguments.add_argument(
        "--profile", type=int, default=0, metavar="ROWS", help="print a profile of each side"
    )
    arguments.add_argument("--time-limit", type=float, default=540, help="seconds after which no turn starts")
    args = arguments.parse_args()
    args.tokens = args.tokens or (TINY_TOKENS if args.tiny else TOKENS)
    return args


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def run_width(width: str, workers: dict[str, Worker], args: argparse.Namespace, deadline: float) -> bool:
    """Measure every side at one width and print the table; return False if logits differ or no side ran."""
    config = stack(width, tiny=args.tiny)
    capacity = next(iter(workers.values())).call("capacity")
    fitted = config if args.tiny else fitting(config, capacity)
    print(f"\n{headline(fitted, config, args)}", flush=True)

    notes: dict[str, str] = {}
    failed: dict[str, str] = {}

    def attempt(name: str, method: str, *values: Any) -> Any:
        """Return the call's result, or None after a failure; a failed side is not called again."""
        if name in failed:
            return None
        if time.monotonic() > deadline:
            failed[name] = "no time left"
            return None
        try:
            return workers[name].call(method, *values)
        except (RuntimeError, OSError) as error:
            failed[name] = " ".join(str(error).removeprefix(f"{method}{values}: ").split())[:300]
            print(f"  {name}: {failed[name]}", flush=True)
            with suppress(RuntimeError, OSError):
                workers[name].call("clean")
            return None

    logits: dict[str, Any] = {}
    for name in workers:
        if (settings := attempt(name, "build", fitted)) is not None:
            notes[name] = settings
            left = deadline - time.monotonic()
            print(f"  {name} built ({left:.0f} s left): {settings}", flush=True)
        if (seen := attempt(name, "logits", min(args.tokens, COMPARED_TOKENS))) is not None:
            logits[name] = seen
    differences = compare(logits)

    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for _ in range(args.rounds):
        for name in workers:
            if (seen := attempt(name, "measure", args.tokens, args.steps)) is not None:
                figures[name].append(seen)
                print(f"  {name}: {statistics.median(seen['seconds']) * 1e3:,.1f} ms", flush=True)
    rows = table(fitted, {name: runs for name, runs in figures.items() if runs}, differences, args)
    if rows:
        header = ["side", "tok/s", "ms", "MFU %", "peak GiB", "waits", "loss", "logits", "tok/s ratio"]
        print(f"\n### {fitted.title}, {fitted.num_layers} layers\n")
        print_table(header, rows)
    for name in workers:
        print(f"- {name}: " + "; ".join(filter(None, (notes.get(name), failed.get(name)))))
    if args.profile:
        for name in workers:
            if (seen := attempt(name, "profile", args.tokens, args.profile)) is not None:
                print(f"\n#### {name}\n{seen}", flush=True)
    wrong = {name: d for name, d in differences.items() if not d <= LOGITS_TOLERANCE}
    for name, difference in wrong.items():
        print(f"logits of {name} differ by {difference:.2g} of their norm: limit {LOGITS_TOLERANCE:.2g}")
    sys.stdout.flush()
    return bool(rows) and not wrong


def headline(fitted: Any, config: Any, args: argparse.Namespace) -> str:
    """Description of the model, with its model FLOPs."""
    from megatron_nemotron3.models.parameters import count

    terms = flops_per_token(fitted, args.tokens)
    parts = ", ".join(f"{name} {value / 1e9:,.3g}" for name, value in terms.items())
    experts = f"{fitted.num_moe_experts} experts top-{fitted.moe_router_topk}"
    if fitted.num_moe_experts != config.num_moe_experts:
        experts += f" (published: {config.num_moe_experts}; more do not fit)"
    return (
        f"{fitted.title}: {fitted.pattern}, {experts}, {count(fitted).stored / 1e9:.3g}B parameters, "
        f"{args.tokens} tokens; {sum(terms.values()) / 1e9:,.3g} GFLOP per token ({parts}); "
        f"logits compared over every {VOCABULARY_STRIDE}th entry of the vocabulary"
    )


def compare(logits: dict[str, Any]) -> dict[str, float]:
    """Relative difference of each side from the first transformers side, or from the first side."""
    import numpy as np

    if not logits:
        return {}
    reference = logits[next((name for name in logits if name.startswith("hf")), next(iter(logits)))]
    norm = np.linalg.norm(reference)
    return {name: float(np.linalg.norm(seen - reference) / norm) for name, seen in logits.items()}


def table(
    config: Any,
    figures: dict[str, list[dict[str, Any]]],
    differences: dict[str, float],
    args: argparse.Namespace,
) -> list[list[str]]:
    """One row per side that was measured."""
    flops = sum(flops_per_token(config, args.tokens).values()) * args.tokens
    rows: list[list[str]] = []
    first = 0.0
    for name, runs in figures.items():
        seconds = statistics.median(s for run in runs for s in run["seconds"])
        first = first or seconds
        utilization = 100 * flops / seconds / (args.peak_tflops * 1e12)
        rows.append(
            [
                name,
                f"{args.tokens / seconds:,.0f}",
                f"{seconds * 1e3:,.1f}",
                f"{utilization:.3g}" if args.device == "cuda" else "-",
                f"{max(run['peak'] for run in runs) / GIB:.3g}",
                str(runs[0]["waits"]),
                f"{runs[0]['loss']:.4f}",
                f"{differences[name]:.1e}",
                f"{first / seconds:.2f}",
            ]
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
