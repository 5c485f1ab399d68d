"""A training step with emulated NVFP4 against the same step without.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python benchmarks/nvfp4.py [--quick]

The linears of one model, with one set of weights, are switched between plain and emulated matmuls. The cases
take turns, and the median times of forward and backward are compared. Nothing is reused from step to step
(Q(W) is made anew, as in a step of one microbatch), and no optimizer runs. The goal for the ratio of times is
1.8 on a CPU and 1.5 on a GPU.

The models are super-tiny (hidden 128) and the benchmarks' Super proportions at hidden 256, with the published
recipe, with NVFP4 in every layer, and with the recipe without single ingredients.

With --device cuda, a stage of gpu.py: the first 11 layers of Super at full width in BF16, without a BF16
tail, with 64 routed experts, which is what a rank has at EP 8. Kernels of the torch backend are on, and
operands are quantized by torch or by compiled passes; on a CPU the plain ones stand in for the latter.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from common import GIB, emit, in_turn, machine, model, parser, peak, seconds, set_threads, show

#: A case: a value of NEMOTRON3_EMULATE (None for plain matmuls), and whether torch.compile may quantize.
Case = tuple[str | None, bool]
#: Value of NEMOTRON3_EMULATE of each case.
CASES = {
    "recipe": "nvfp4",
    "every layer": "nvfp4,every_layer=1",
    "no RHT": "nvfp4,rht=0",
    "no SR": "nvfp4,sr=0",
    "no 2D": "nvfp4,2d=0",
}
#: Routed experts of a rank of Super at EP 8.
EXPERTS = 64


@contextmanager
def quantizing(compiled: bool) -> Iterator[None]:
    """Quantize operands by compiled passes, if kernels are on, or by plain ones."""
    from megatron_nemotron3.precision import quantizer

    plain = mock.patch.object(quantizer, "_form", lambda function, x: function)
    with nullcontext() if compiled else plain:
        yield


class Switched:
    """A model with one set of weights whose linears compute as a case says.

    Args:
        config: `Nemotron3Config`.
        texts: values of NEMOTRON3_EMULATE.
        tail: layers at the end in BF16.
    """

    def __init__(self, config: Any, dtype: Any, texts: list[str], tail: int, device: str = "cpu") -> None:
        import torch
        from megatron.core.quantization.utils import load_quantization_recipe

        from megatron_nemotron3.precision.yaml_file import render

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "precision.yaml"
            file.write_text(render(config))
            self._recipe = load_quantization_recipe(str(file))
        self._config, self._dtype, self._tail, self._device = config, dtype, tail, device
        # Each text has a model of its own; all but the last leave only how their linears multiply.
        made = {}
        for text in texts:
            self.module = None
            self.module = self._build(text, initialized=text == texts[-1])
            made[text] = {n: m.products for n, m in self.module.named_modules() if hasattr(m, "products")}
        self.linears = {n: m for n, m in self.module.named_modules() if hasattr(m, "products")}
        self.products: dict[str | None, dict[str, Any]] = {None: dict.fromkeys(self.linears), **made}
        self.module = self.module.train()
        self._stream = torch.Generator().manual_seed(5)
        self.step((texts[-1], True), 64)  # a first forward without emulation would be an error

    def _build(self, text: str, *, initialized: bool) -> Any:
        from weights import fill, megatron_pieces

        from megatron_nemotron3.precision.settings import emulating, parse_emulation
        from tests.support.model_mapping import megatron_model, randomize

        with emulating(parse_emulation(text)):
            module = megatron_model(
                self._config,
                bf16=self._dtype.itemsize == 2,
                params_dtype=self._dtype,
                use_cpu_initialization=self._device == "cpu",
                quant_recipe=self._recipe,
                first_last_layers_bf16=True,
                num_layers_at_start_in_bf16=0,
                num_layers_at_end_in_bf16=self._tail,
            ).to(self._dtype)
        if initialized and self._config.has_mtp:  # of which transformers has no weights
            randomize(module, seed=6)
        elif initialized:
            fill(megatron_pieces(module, self._config))
        return module

    def step(self, case: Case, tokens: int, measure: Callable[..., Any] = seconds) -> Any:
        """Measure forward and backward of one sequence. Q(W) is made anew."""
        import torch

        text, compiled = case
        for name, linear in self.linears.items():
            linear.products = self.products[text][name]
        self.module.set_is_first_microbatch()
        self.module.zero_grad(set_to_none=True)
        stream = torch.randint(self._config.vocab_size, (1, tokens + 1), generator=self._stream)
        stream = stream.to(self._device)
        positions = torch.arange(tokens, device=self._device).unsqueeze(0)

        def run() -> None:
            self.module(stream[:, :-1], positions, None, labels=stream[:, 1:].contiguous()).mean().backward()

        with quantizing(compiled):
            return measure(run, self._device)


def on_gpu(device: str, small: bool) -> None:
    """Print a step of Super's width: plain, and with operands quantized by torch and by compiled passes."""
    os.environ["NEMOTRON3_GPU_KERNELS"] = "1"
    import torch
    from models import stack

    from tests.support.gpu_world import host_waits, world

    config = stack("super", tiny=small)
    config = config if small else config.but(num_moe_experts=EXPERTS)
    tokens, rounds = (32, 1) if small else (8192, 5)
    emit("model", {"pattern": config.pattern, "experts": config.num_moe_experts, "tokens": tokens})
    cases: dict[str, Case] = {"plain": (None, True), "torch": ("nvfp4", False), "compiled": ("nvfp4", True)}
    rows = []
    with world(device):
        switched = Switched(config, torch.bfloat16, ["nvfp4"], 0, device)
        calls = [partial(switched.step, case, tokens) for case in cases.values()]
        medians = in_turn(calls, rounds + 1)  # compilation takes a step or two
        for (name, case), median in zip(cases.items(), medians, strict=True):
            rows.append(
                {
                    "quantizer": name,
                    "ms": 1e3 * median,
                    "ratio": median / medians[0],
                    "peak GiB": switched.step(case, tokens, peak) / GIB,
                    "waits": switched.step(case, tokens, host_waits),
                }
            )
    show(rows, "step")


def on_cpu(rounds: int, quick: bool) -> None:
    """Print the ratio of each case."""
    import torch

    from megatron_nemotron3.models import get
    from megatron_nemotron3.precision.table import bf16_tail
    from tests.support.gpu_world import world

    cases = dict(list(CASES.items())[: 2 if quick else None])
    runs = [("super-tiny", get("super-tiny"), 256 if quick else 1024, torch.float32)]
    if not quick:
        # 16 heads: an in_proj of 8 would not fill NVFP4's blocks.
        middle = model().but(mamba_num_heads=16, mamba_head_dim=32)
        runs += [("hidden 256", middle, 1024, dtype) for dtype in (torch.float32, torch.bfloat16)]
    rows = []
    with world("cpu"):
        for name, config, tokens, dtype in runs:
            switched = Switched(config, dtype, list(cases.values()), bf16_tail(config))
            calls = [partial(switched.step, (text, True), tokens) for text in (None, *cases.values())]
            plain, *others = in_turn(calls, rounds)
            row = {
                "model": name,
                "dtype": str(dtype).removeprefix("torch."),
                "tokens": tokens,
                "plain ms": f"{plain * 1e3:,.0f}",
            }
            ratios = {case: f"{took / plain:.2f}" for case, took in zip(cases, others, strict=True)}
            rows.append(row | ratios)
    show(rows)


def main() -> None:
    options = parser(__doc__, gpu=True)
    options.add_argument("--quick", action="store_true", help="the tiny model, FP32, one round, two cases")
    options.add_argument("--rounds", type=int, default=None, help="default 5")
    args = options.parse_args()
    from sides import quiet

    set_threads()
    quiet()
    print(machine(), flush=True)
    if args.device == "cuda" or args.small:
        on_gpu(args.device, args.small)
    else:
        on_cpu(args.rounds or (1 if args.quick else 5), args.quick)


if __name__ == "__main__":
    main()
