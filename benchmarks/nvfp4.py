"""A training step with emulated NVFP4 against the same step without, on the CPU.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python benchmarks/nvfp4.py [--quick]

One model with one set of weights, whose linears are switched between plain and emulated products. The two
take turns, and the medians of forward and backward are compared. Nothing is reused from step to step (Q(W) is
made anew, as in a step of one microbatch), and no optimizer runs. Ratios are of time; the goal is 1.8.

models   super-tiny (hidden 128) and the benchmarks' Super proportions at hidden 256
cases    the published recipe; NVFP4 in every layer; the recipe without single ingredients
products one linear alone: the three products plain, and the quantization of each operand
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import in_turn, machine, model, print_table, set_threads, timed, world_of_one

#: Value of NEMOTRON3_EMULATE of each case.
CASES = {
    "recipe": "nvfp4",
    "every layer": "nvfp4,every_layer=1",
    "no RHT": "nvfp4,rht=0",
    "no SR": "nvfp4,sr=0",
    "no 2D": "nvfp4,2d=0",
}
#: Tokens in, width in, width out of the linears measured alone.
SHAPES = ((1024, 256, 1296), (2048, 1024, 2048))


class Switched:
    """A model whose linears multiply as a case says."""

    def __init__(self, config: Any, dtype: Any, cases: dict[str, str]) -> None:
        import torch
        from megatron.core.quantization.utils import load_quantization_recipe

        from megatron_nemotron3.precision.settings import VARIABLE
        from megatron_nemotron3.precision.table import bf16_tail
        from megatron_nemotron3.precision.yaml_file import render
        from tests.parity.mapping import megatron_model, randomize

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "precision.yaml"
            file.write_text(render(config))
            fields = {
                "quant_recipe": load_quantization_recipe(str(file)),
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 0,
                "num_layers_at_end_in_bf16": bf16_tail(config),
            }
        os.environ[VARIABLE] = CASES["recipe"]
        self.module = megatron_model(config, bf16=dtype.itemsize == 2, params_dtype=dtype, **fields)
        del os.environ[VARIABLE]
        randomize(self.module, seed=6)
        self.module = self.module.to(dtype).train()
        self.vocabulary = config.vocab_size
        self.linears = {n: m for n, m in self.module.named_modules() if hasattr(m, "products")}
        self.plain: dict[str, Any] = dict.fromkeys(self.linears)
        self.products = {name: self._products(text, fields["quant_recipe"]) for name, text in cases.items()}
        self.generator = torch.Generator().manual_seed(5)

    def _products(self, text: str, recipe: Any) -> dict[str, Any]:
        from megatron.core.quantization.utils import get_quant_config_or_none

        from megatron_nemotron3.precision import settings

        chosen = settings.parse(text)
        found = {}
        for name, linear in self.linears.items():
            settle = linear.finish_init
            where, ambient, _ = settle.args[1:]
            ambient = "nvfp4" if text == CASES["every layer"] and "eh_proj" not in where else ambient
            settle.func(linear, where, ambient, chosen, get_quant_config_or_none(name, recipe))
            found[name] = linear.products
        return found

    def step(self, case: str | None, tokens: int) -> float:
        """Seconds of forward and backward of one sequence."""
        import torch

        chosen = self.plain if case is None else self.products[case]
        for name, linear in self.linears.items():
            linear.products = chosen[name]
        self.module.set_is_first_microbatch()
        self.module.zero_grad(set_to_none=True)
        stream = torch.randint(self.vocabulary, (1, tokens + 1), generator=self.generator)
        positions = torch.arange(tokens).unsqueeze(0)

        def run() -> None:
            self.module(stream[:, :-1], positions, None, labels=stream[:, 1:].contiguous()).mean().backward()

        return timed(run)


def compare(name: str, config: Any, tokens: int, dtype: Any, cases: dict[str, str], rounds: int) -> list[str]:
    """A row: seconds of the plain step, and the ratio of each case."""
    switched = Switched(config, dtype, cases)
    calls: list[Callable[[], float]] = [partial(switched.step, case, tokens) for case in (None, *cases)]
    plain, *others = in_turn(calls, rounds)
    row = [name, str(dtype).removeprefix("torch."), str(tokens), f"{plain * 1e3:,.0f}"]
    return row + [f"{seconds / plain:.2f}" for seconds in others]


def three(x: Any, w: Any, dy: Any) -> tuple[Any, Any, Any]:
    """fprop, dgrad, wgrad."""
    return x @ w.t(), dy @ w, dy.t() @ x


def products(rounds: int) -> list[list[str]]:
    """Rows: a linear's three products, and what quantizing each operand costs, in ms."""
    import torch

    from megatron_nemotron3.precision.products import operand
    from megatron_nemotron3.precision.spec import NVFP4

    rows = []
    for tokens, inner, outer in SHAPES:
        x, w, dy = torch.randn(tokens, inner), torch.randn(outer, inner), torch.randn(tokens, outer)
        sources = {"x": x, "weight": w, "dgrad_dy": dy, "wgrad_dy": dy, "wgrad_x": x}
        work = [partial(three, x, w, dy)]
        work += [partial(operand, t, getattr(NVFP4, role)) for role, t in sources.items()]
        work.append(partial(three, x.bfloat16(), w.bfloat16(), dy.bfloat16()))
        seconds = in_turn([partial(timed, part) for part in work], 3 * rounds)
        rows.append([f"{tokens} x {inner} x {outer}", *(f"{s * 1e3:.2f}" for s in seconds)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the tiny model, FP32, one round, two cases")
    parser.add_argument("--rounds", type=int, default=None, help="default 5")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 5)
    set_threads()
    import torch

    from megatron_nemotron3.models import get

    cases = dict(list(CASES.items())[: 2 if args.quick else None])
    runs = [("super-tiny", get("super-tiny"), 256 if args.quick else 1024, torch.float32)]
    if not args.quick:
        # 16 heads: an in_proj of 8 would not fill NVFP4's blocks.
        middle = model().but(mamba_num_heads=16, mamba_head_dim=32)
        runs += [
            ("hidden 256", middle, 1024, torch.float32),
            ("hidden 256", middle, 1024, torch.bfloat16),
        ]
    print(machine(), flush=True)
    with world_of_one():
        rows = [compare(*run, cases, rounds) for run in runs]
    print_table(["model", "dtype", "tokens", "plain ms", *cases], rows)
    print("\none linear, ms")
    header = ["tokens x in x out", "products", "Q(x)", "Q(W)", "Q(dY)", "Q(dY^T)", "Q(X^T)", "products BF16"]
    print_table(header, products(rounds))


if __name__ == "__main__":
    main()
