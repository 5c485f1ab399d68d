"""Emulated linears of experts: one quantization of all tokens, a scale and a product for each expert.

TransformerEngine splits the tokens by expert and quantizes each part for itself, filled up with zero rows. So
does this, in one pass over all of them: an expert has a largest magnitude of its own, and no block holds
tokens of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.monitor.hooks import first_forward
from megatron_nemotron3.precision.products import Operand, dequantized, matmul, operand
from megatron_nemotron3.precision.recipe import Recipe, Spec
from megatron_nemotron3.precision.scales import product_scale
from megatron_nemotron3.precision.statistics import Record
from megatron_nemotron3.precision.table import NVFP4


def stacked_operand(weights: Sequence[Tensor], how: Spec) -> Operand:
    """E matrices [out, in] -> values [E, out, in], each with its own scale; amax [E, 1, 1] or None."""
    amax = _of_matrices if how.format == NVFP4 else None
    return operand(torch.stack([w.detach() for w in weights]), how, amax)


def _of_matrices(block_amax: Tensor) -> Tensor:
    """Block grid [E, m, k] -> [E, 1, 1]."""
    return block_amax.flatten(1).amax(1).view(-1, 1, 1)


class Rows:
    """Which rows belong to which expert. `block`: rows of an expert are filled up to a multiple of it."""

    def __init__(self, counts: Sequence[int], block: int, device: torch.device) -> None:
        self.block = block
        self.filled = [-(-n // block) * block for n in counts]
        #: (expert, first row, row behind the last) of experts that have rows.
        self.ranges: list[tuple[int, int, int]] = []
        start = 0
        for expert, n in enumerate(self.filled):
            if n:
                self.ranges.append((expert, start, start + n))
            start += n
        self.experts, self.total = len(counts), start
        real = torch.tensor(counts, device=device)
        filled = torch.tensor(self.filled, device=device)
        numbers = torch.arange(len(counts), device=device)
        #: Expert of each block of rows.
        self.block_owner = numbers.repeat_interleave(filled // block, output_size=start // block)
        #: Rows of each expert that only fill up blocks.
        self.filler = filled - real
        if block > 1:  # where each row goes
            shift = (filled.cumsum(0) - filled) - (real.cumsum(0) - real)
            owner = numbers.repeat_interleave(real, output_size=sum(counts))
            self.place = torch.arange(len(owner), device=device) + shift[owner]

    @property
    def owner(self) -> Tensor:
        """Expert of each row."""
        return self.block_owner.repeat_interleave(self.block, output_size=self.total)

    def fill(self, x: Tensor) -> Tensor:
        """[t, d] -> [sum of filled counts, d]."""
        if self.total == len(x):
            return x
        return x.new_zeros(self.total, x.shape[1]).index_copy_(0, self.place, x)

    def amax(self, block_amax: Tensor) -> Tensor:
        """Block grid [n, m], rows or blocks of rows -> [n, 1], the largest magnitude of the row's expert."""
        largest = block_amax.amax(1)
        of_expert = largest.new_zeros(self.experts).scatter_reduce_(0, self.block_owner, largest, "amax")
        return of_expert[self.block_owner].unsqueeze(1)

    def operand(self, x: Tensor, how: Spec) -> Operand:
        """Quantize rows; amax [n, 1], n rows or blocks of rows, or None."""
        return operand(x, how, self.amax if how.format == NVFP4 else None)


class GroupedLinear(torch.autograd.Function):
    """x [t, in], counts, recipe, context of random draws, record or None, Q(W) of fprop, E weights [out, in]
    -> [t, out]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        counts: list[int],
        recipe: Recipe,
        draws: Callable[[], AbstractContextManager[None]],
        record: Record | None,
        kept: Operand | None,
        *weights: Tensor,
    ) -> Tensor:
        rows = Rows(counts, 1, x.device)
        if recipe.fprop is None or kept is None:
            y = _plain(x, [w.t() for w in weights], rows)
        else:
            a = rows.operand(x, recipe.fprop[0])
            if record is not None and first_forward():
                record.add("fprop.x", x, recipe.fprop[0], dequantized(a), rows.owner)
                _observe_weights(record, "fprop.weight", weights, recipe.fprop[1], kept)
            y = _scaled(a, kept, [w.t() for w in kept.values], rows, x.dtype)
        shared = kept if kept is not None and recipe.shares_weight else (None, None)
        ctx.save_for_backward(x, *shared, *weights)
        ctx.counts, ctx.recipe, ctx.draws, ctx.record, ctx.rows = counts, recipe, draws, record, rows
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, values, amax, *weights = ctx.saved_tensors
        dy, recipe = grad.contiguous(), ctx.recipe
        dx: Tensor | None = None
        dw: tuple[Tensor | None, ...] = (None,) * len(weights)
        with ctx.draws():
            if ctx.needs_input_grad[0] and recipe.dgrad is None:
                dx = _plain(dy, weights, ctx.rows)
            elif ctx.needs_input_grad[0]:
                how_dy, how_weight = recipe.dgrad
                a = ctx.rows.operand(dy, how_dy)
                w = stacked_operand(weights, how_weight) if values is None else Operand(values, amax)
                if ctx.record is not None:
                    ctx.record.add("dgrad.dy", dy, how_dy, dequantized(a), ctx.rows.owner)
                    if values is None:
                        _observe_weights(ctx.record, "dgrad.weight", weights, how_weight, w)
                dx = _scaled(a, w, list(w.values), ctx.rows, x.dtype)
            if any(ctx.needs_input_grad[6:]):
                dw = _weight_gradients(dy, x, ctx.counts, recipe, weights[0], ctx.record)
        return dx, None, None, None, None, None, *dw


def _observe_weights(record: Record, name: str, weights: Sequence[Tensor], how: Spec, made: Operand) -> None:
    """E matrices; once a step."""
    if not record.has(name):
        rows = torch.arange(len(weights), device=weights[0].device).repeat_interleave(len(weights[0]))
        record.add(name, torch.stack([w.detach() for w in weights]), how, dequantized(made), rows)


def _plain(x: Tensor, weights: Sequence[Tensor], rows: Rows) -> Tensor:
    """x [t, k], E matrices [k, n] -> [t, n]."""
    y = x.new_empty(len(x), weights[0].shape[1])
    for e, a, b in rows.ranges:
        torch.mm(x[a:b], weights[e], out=y[a:b])
    return y


def _scaled(
    x: Operand, weight: Operand, matrices: Sequence[Tensor], rows: Rows, dtype: torch.dtype
) -> Tensor:
    """As `_plain`, of quantized operands; accumulated and scaled in FP32, rounded once to `dtype`."""
    y = x.values.new_empty(len(x.values), matrices[0].shape[1], dtype=torch.float32)
    for e, a, b in rows.ranges:
        matmul(x.values[a:b], matrices[e], out=y[a:b])
    if x.amax is not None and weight.amax is not None:
        y.mul_(product_scale(x.amax, weight.amax.view(-1)[rows.block_owner].unsqueeze(1)))
    return y.to(dtype)


def _weight_gradients(
    dy: Tensor, x: Tensor, counts: list[int], recipe: Recipe, like: Tensor, record: Record | None
) -> tuple[Tensor, ...]:
    """E gradients [out, in], slices of one tensor; zero for experts without rows."""
    rows = Rows(counts, recipe.token_block, x.device)
    dw = like.new_empty(len(counts), *like.shape)
    for e in {*range(len(counts))} - {e for e, _, _ in rows.ranges}:
        dw[e].zero_()
    if recipe.wgrad is None:
        for e, a, b in rows.ranges:
            torch.mm(dy[a:b].t(), x[a:b], out=dw[e])
        return dw.unbind(0)
    p, q = (rows.operand(rows.fill(z), how) for z, how in zip((dy, x), recipe.wgrad, strict=True))
    if record is not None:
        for name, z, how, made in zip(("wgrad.dy", "wgrad.x"), (dy, x), recipe.wgrad, (p, q), strict=True):
            record.add(name, rows.fill(z), how, dequantized(made), rows.owner, rows.filler)
    scale = None
    if p.amax is not None and q.amax is not None:
        scale = product_scale(p.amax, q.amax)  # [blocks of rows, 1]
    for e, a, b in rows.ranges:
        product = matmul(p.values[a:b].t(), q.values[a:b])
        dw[e] = product if scale is None else product.mul_(scale[a // rows.block])
    return dw.unbind(0)
