"""A training step with emulated NVFP4 against the same step without.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python benchmarks/nvfp4.py [--quick]
    python benchmarks/nvfp4.py --device cuda

The linears of one model, with one set of weights, are switched between plain and emulated matmuls. The cases
take turns, and the median times of forward and backward are compared. Nothing is reused from step to step
(Q(W) is made anew, as in a step of one microbatch), and no optimizer runs. The goal for the ratio of times is
1.8 on a CPU and 1.5 on a GPU.

On a CPU: super-tiny (hidden 128) and the benchmarks' Super proportions at hidden 256, with the published
recipe, with NVFP4 in every layer, and with the recipe without single ingredients.

On a GPU: the first 11 layers of Super at full width in BF16, without a BF16 tail, with 64 routed experts.
That is what a rank has at EP=8, and with the tokens of one sequence it does the work of such a rank. Kernels
of the torch backend are on in every case (NEMOTRON3_GPU_KERNELS=1 unless set); torch or Triton quantizes.
"peak" is the largest allocation of a step without weights, "waits" counts host waits
(`gpu_world.host_waits`).

Last, one linear alone: its three plain matmuls, and the quantization of each operand.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

from common import in_turn, machine, model, print_table, set_threads
from gpu_side import quiet
from gpu_world import host_waits, world
from nvfp4_model import Case, Switched, linear_row, peak

#: Value of NEMOTRON3_EMULATE of each case.
CASES = {
    "recipe": "nvfp4",
    "every layer": "nvfp4,every_layer=1",
    "no RHT": "nvfp4,rht=0",
    "no SR": "nvfp4,sr=0",
    "no 2D": "nvfp4,2d=0",
}
SIDES: dict[str, Case] = {"plain": (None, True), "torch": ("nvfp4", False), "Triton": ("nvfp4", True)}
#: Tokens, input width and output width of the linears that are measured alone.
SHAPES = ((1024, 256, 1296), (2048, 1024, 2048))
LINEAR = ["tokens x in x out", "products", "Q(x)", "Q(W)", "Q(dY)", "Q(dY^T)", "Q(X^T)", "products BF16"]
GIB = 2**30


def on_cpu(rounds: int, quick: bool) -> None:
    """Print the ratio of each case, and times of single linears."""
    import torch

    from megatron_nemotron3.models import get
    from megatron_nemotron3.precision.table import bf16_tail

    cases = dict(list(CASES.items())[: 2 if quick else None])
    runs = [("super-tiny", get("super-tiny"), 256 if quick else 1024, torch.float32)]
    if not quick:
        # 16 heads: an in_proj of 8 would not fill NVFP4's blocks.
        middle = model().but(mamba_num_heads=16, mamba_head_dim=32)
        runs += [
            ("hidden 256", middle, 1024, torch.float32),
            ("hidden 256", middle, 1024, torch.bfloat16),
        ]
    rows = []
    with world("cpu"):
        for name, config, tokens, dtype in runs:
            switched = Switched(config, dtype, list(cases.values()), bf16_tail(config))
            texts = (None, *cases.values())
            calls = [partial(switched.step, (text, True), tokens) for text in texts]
            plain, *others = in_turn(calls, rounds)
            row = [name, str(dtype).removeprefix("torch."), str(tokens), f"{plain * 1e3:,.0f}"]
            rows.append(row + [f"{seconds / plain:.2f}" for seconds in others])
    print_table(["model", "dtype", "tokens", "plain ms", *cases], rows)
    print("\none linear, ms")
    rows = [[label(shape), *linear_row(shape, "cpu", torch.float32, 3 * rounds, True)] for shape in SHAPES]
    print_table(LINEAR, rows)


def sides(switched: Any, tokens: int, rounds: int, device: str) -> None:
    """Print a row for each of `SIDES`."""
    calls = [partial(switched.step, case, tokens) for case in SIDES.values()]
    medians = dict(zip(SIDES, in_turn(calls, rounds + 1), strict=True))  # compilation takes a step or two
    rows = []
    for name, case in SIDES.items():
        memory = switched.step(case, tokens, peak)
        waits = switched.step(case, tokens, host_waits)
        row = [name, f"{medians[name] * 1e3:,.1f}", f"{medians[name] / medians['plain']:.2f}"]
        rows.append([*row, f"{memory / GIB:.2f}", str(waits)])
    print_table(["side", "ms", "ratio", "peak GiB", "waits"], rows)


def at_width(args: argparse.Namespace, rounds: int) -> None:
    """Compare plain, quantized by torch and quantized by Triton: a step, and single linears of the model."""
    import torch
    from gpu_model import stack

    tiny, device = args.tiny, args.device
    config = stack("super", tiny=tiny)
    config = config if tiny else config.but(num_moe_experts=args.experts)
    tokens = args.tokens or (64 if tiny else 8192)
    parts = f"layers {config.pattern}, {config.num_moe_experts} experts, {tokens} tokens, BF16"
    print(f"\n{config.title}, {parts}", flush=True)
    if device == "cpu":
        print("a rehearsal: on a CPU torch stands in for Triton")
    with world(device):
        sides(Switched(config, torch.bfloat16, ["nvfp4"], 0, device), tokens, rounds, device)
        print("\none linear, ms")
        inner = config.mamba_num_heads * config.mamba_head_dim
        states = 2 * config.mamba_num_groups * config.mamba_state_dim
        in_proj = (tokens, config.hidden_size, 2 * inner + states + config.mamba_num_heads)
        shared = (tokens, config.hidden_size, config.moe_shared_expert_intermediate_size)
        rows = []
        for name, shape in (("in_proj", in_proj), ("shared FC1", shared)):
            for side in ("torch", "Triton"):
                figures = linear_row(shape, device, torch.bfloat16, 3 * rounds, SIDES[side][1])
                rows.append([f"{name}, {side}", label(shape), *figures])
        print_table(["linear, quantizer", *LINEAR], rows)


def label(shape: tuple[int, int, int]) -> str:
    return " x ".join(str(size) for size in shape)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="CPU: the tiny model, FP32, one round, two cases"
    )
    parser.add_argument("--tiny", action="store_true", help="what --device cuda measures, but small")
    parser.add_argument("--experts", type=int, default=64, help="GPU: routed experts (default: 64)")
    parser.add_argument("--tokens", type=int, default=None, help="GPU: default 8192")
    parser.add_argument("--rounds", type=int, default=None, help="default 5")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    rounds = args.rounds or (1 if args.quick else 5)
    os.environ.setdefault("NEMOTRON3_GPU_KERNELS", "1")
    set_threads()
    quiet()
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: run this on a GPU, or leave out --device cuda", file=sys.stderr)
        return 2
    where = f", {torch.cuda.get_device_name()}" if args.device == "cuda" else ""
    print(machine() + where, flush=True)
    if args.device == "cuda" or args.tiny:
        at_width(args, rounds)
    else:
        on_cpu(rounds, args.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
