"""Subjects of nvfp4.py and gpu_nvfp4.py.

A model whose linears switch between plain and emulated matmuls, and single linears.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from common import peak_memory, timed

#: A case: a value of NEMOTRON3_EMULATE (None for plain matmuls), and whether torch.compile may quantize.
Case = tuple[str | None, bool]
#: Columns of `linear_row` after the shape.
LINEAR = ["tokens x in x out", "products", "Q(x)", "Q(W)", "Q(dY)", "Q(dY^T)", "Q(X^T)", "products BF16"]


def seconds(function: Callable[[], Any], device: str) -> float:
    """Time of one call in seconds; on a GPU between two events, after the queue is empty."""
    import torch

    if device == "cpu":
        return timed(function)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def peak(function: Callable[[], Any], device: str) -> int:
    """Peak memory of `function` in bytes, without what is allocated before it."""
    import torch

    if device == "cpu":
        return peak_memory(function)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - idle)


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
        from gpu_weights import fill, megatron_pieces

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


def label(shape: tuple[int, int, int]) -> str:
    """A shape for a table."""
    return " x ".join(str(size) for size in shape)


def three(x: Any, w: Any, dy: Any) -> tuple[Any, Any, Any]:
    """fprop, dgrad, wgrad."""
    return x @ w.t(), dy @ w, dy.t() @ x


def linear_row(
    shape: tuple[int, int, int], device: str, dtype: Any, rounds: int, compiled: bool
) -> list[str]:
    """Milliseconds of a linear's three matmuls, of quantizing each operand, and of the matmuls in BF16.

    Args:
        shape: tokens, width in, width out.
    """
    import torch

    from megatron_nemotron3.precision.products import operand
    from megatron_nemotron3.precision.recipe import recipe
    from megatron_nemotron3.precision.settings import Emulation

    tokens, inner, outer = shape
    x, w, dy = (
        torch.randn(*size, device=device, dtype=dtype)
        for size in ((tokens, inner), (outer, inner), (tokens, outer))
    )
    published = recipe("nvfp4", Emulation())
    assert published and published.fprop and published.dgrad and published.wgrad
    operands = (*published.fprop, published.dgrad[0], *published.wgrad)
    work: list[Callable[[], Any]] = [partial(three, x, w, dy)]
    work += [partial(operand, t, how) for t, how in zip((x, w, dy, dy, x), operands, strict=True)]
    work.append(partial(three, x.bfloat16(), w.bfloat16(), dy.bfloat16()))
    with quantizing(compiled):
        found = [[seconds(part, device) for part in work] for _ in range(rounds + 2)][2:]
    return [f"{statistics.median(column) * 1e3:.2f}" for column in zip(*found, strict=True)]
