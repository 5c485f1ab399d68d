"""A training step with emulated NVFP4 against the same step without.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python benchmarks/nvfp4.py [--quick]

The linears of one model, with one set of weights, are switched between plain and emulated matmuls. The cases
take turns, and the median times of forward and backward are compared. Nothing is reused from step to step
(Q(W) is made anew, as in a step of one microbatch), and no optimizer runs. The goal for the ratio of times is
1.8 on a CPU and 1.5 on a GPU.

The models are super-tiny (hidden 128) and the benchmarks' Super proportions at hidden 256, with the published
recipe, with NVFP4 in every layer, and with the recipe without single ingredients. On a GPU: gpu_nvfp4.py.

Last, one linear alone: its three plain matmuls, and the quantization of each operand.
"""

from __future__ import annotations

import argparse
from functools import partial

from common import in_turn, machine, model, parser, print_table, set_threads
from gpu_side import quiet
from gpu_world import world
from nvfp4_model import LINEAR, Switched, label, linear_row

#: Value of NEMOTRON3_EMULATE of each case.
CASES = {
    "recipe": "nvfp4",
    "every layer": "nvfp4,every_layer=1",
    "no RHT": "nvfp4,rht=0",
    "no SR": "nvfp4,sr=0",
    "no 2D": "nvfp4,2d=0",
}
#: Tokens, input width and output width of the linears that are measured alone.
SHAPES = ((1024, 256, 1296), (2048, 1024, 2048))


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


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="the tiny model, FP32, one round, two cases")
    options.add_argument("--rounds", type=int, default=None, help="default 5")
    return options.parse_args()


def main() -> None:
    args = arguments()
    set_threads()
    quiet()
    print(machine(), flush=True)
    on_cpu(args.rounds or (1 if args.quick else 5), args.quick)


if __name__ == "__main__":
    main()
