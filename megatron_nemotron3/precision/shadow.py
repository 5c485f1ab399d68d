"""A linear that computes as ever and shows what quantization would do to its operands.

It takes the place of `products`, in measured steps only. The product is Megatron's own, so losses do not
change by a bit; stochastic rounding draws from a generator of its own. The operands are those of the plain
run: in an emulated one the errors of the layers before are in them, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_nemotron3.monitor.hooks import first_forward
from megatron_nemotron3.precision.experts import Rows
from megatron_nemotron3.precision.products import Recipe, padded
from megatron_nemotron3.precision.quantizer import fake_quantize
from megatron_nemotron3.precision.record import Record
from megatron_nemotron3.precision.spec import Spec
from megatron_nemotron3.precision.table import NVFP4

_SEED = 20251201


@dataclass
class Observed:
    """`products` of a linear that is measured and not emulated."""

    record: Record
    how: Recipe
    _generator: torch.Generator | None = None

    def recipe(self, module: Any) -> Recipe | None:
        """None outside of measured steps: then the linear does not come here at all."""
        return self.how if self.record.watching(module) else None

    def linear(self, module: Any, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """x [s, b, in] -> [s, b, out], as the linear itself; options are those of Megatron's function."""
        if isinstance(module, (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)):
            y: Tensor = self._plainly(module, module._forward_impl, x, weight, **options)
        else:
            y = self._plainly(module, module.forward, x)[0]
        if first_forward():
            with torch.no_grad():
                whole = _gather(x, options["tp_group"]) if options.get("sequence_parallel") else x
                self._operands("x", whole.flatten(0, -2))
                self._weight(weight)
        if y.requires_grad:
            y.register_hook(lambda dy: self._operands("dy", dy.flatten(0, -2)))
        return y

    def grouped(self, module: Any, x: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
        """x [t, in], rows sorted by expert -> [t, out], as the linear itself."""
        y: Tensor = self._plainly(module, module.forward, x, counts)[0]
        if first_forward():
            with torch.no_grad():
                self._operands("x", x, counts)
                self._weight(torch.stack([w.detach() for w in weights]))
        if y.requires_grad:
            y.register_hook(lambda dy: self._operands("dy", dy, counts))
        return y

    def _plainly(self, module: Any, function: Any, *args: Any, **options: Any) -> Any:
        module.products = None
        try:
            return function(*args, **options)
        finally:
            module.products = self

    @torch.no_grad()
    def _operands(self, which: str, x: Tensor, counts: list[int] | None = None) -> None:
        """X or dY [t, d] in the two products it takes part in."""
        across = self.how.fprop if which == "x" else self.how.dgrad
        assert across and self.how.wgrad
        product = "fprop" if which == "x" else "dgrad"
        self._operand(f"{product}.{which}", x.contiguous(), across[0], counts, 1)
        along = self.how.wgrad[1 if which == "x" else 0]
        self._operand(f"wgrad.{which}", x.contiguous(), along, counts, self.how.token_block)

    def _operand(self, name: str, x: Tensor, how: Spec, counts: list[int] | None, block: int) -> None:
        if counts is None:
            filled = padded(x, block)
            filler = torch.tensor([len(filled) - len(x)], device=x.device)
            self.record.add(name, filled, how, self._quantized(filled, how), None, filler)
            return
        rows = Rows(counts, block, x.device)
        filled = rows.fill(x)
        q = self._quantized(filled, how, rows.amax if how.format == NVFP4 else None)
        self.record.add(name, filled, how, q, rows.owner, rows.filler)

    def _weight(self, weight: Tensor) -> None:
        """[out, in], or of experts [E, out, in]."""
        assert self.how.fprop and self.how.dgrad
        pairs = [("fprop.weight", self.how.fprop[1])]
        pairs += [] if self.how.shares_weight else [("dgrad.weight", self.how.dgrad[1])]
        for name, how in pairs:
            if self.record.has(name):
                continue
            amax, owner = None, None
            if weight.ndim == 3:
                owner = torch.arange(len(weight), device=weight.device).repeat_interleave(weight.shape[1])
                amax = weight.abs().amax((1, 2), keepdim=True).float() if how.format == NVFP4 else None
            self.record.add(name, weight, how, self._quantized(weight, how, amax), owner)

    def _quantized(self, x: Tensor, how: Spec, amax: Any = None) -> Tensor:
        if self._generator is None:
            self._generator = torch.Generator(x.device).manual_seed(_SEED)
        return fake_quantize(x, how, self._generator, amax, dtype=torch.float32)


def _gather(x: Tensor, group: Any) -> Tensor:
    """[s / tp, ...] -> [s, ...]."""
    total = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(total, x.contiguous(), group=group)
    return total
