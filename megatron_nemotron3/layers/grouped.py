"""Grouped matrix products: rows of x are sorted by expert, expert e multiplies its rows by its matrix.

grouped_linear         y = x W_e^T
squared_relu_experts   y = (relu(x W1_e^T)^2 * probability) W2_e^T, some experts at a time
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Elements between FC1 and FC2 handled at once on CPU: 512 KiB in FP32, to stay in the second-level cache.
BLOCK_ELEMENTS = 2**17


def grouped_linear_reference(x: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
    """The definition: split, one `F.linear` an expert, concatenate. Shapes as `grouped_linear`."""
    return torch.cat([F.linear(part, w) for part, w in zip(torch.split(x, counts), weights, strict=True)])


def grouped_linear(x: Tensor, weights: list[Any], counts: list[int]) -> Tensor:
    """y[rows of expert e] = x[rows of expert e] @ weights[e].T

    Args:
        x: [t, in], rows sorted by expert.
        weights: E matrices [out, in].
        counts: rows of each expert; they add up to t. Zero is fine.

    Returns:
        [t, out]. The backward writes each gradient into one preallocated tensor and gives experts
        without rows a zero gradient, as Megatron's distributed optimizer needs one for everybody.

    Raises:
        ValueError: counts do not match x or weights.
    """
    _check(x, weights, counts)
    result: Tensor = _GroupedLinear.apply(x, counts, *weights)
    return result


#: (expert, start, end) of experts that have rows.
_Ranges = list[tuple[int, int, int]]


def _ranges(counts: list[int]) -> _Ranges:
    """(expert, start, end) of experts that have rows."""
    ranges, start = [], 0
    for expert, n in enumerate(counts):
        if n:
            ranges.append((expert, start, start + n))
        start += n
    return ranges


def _products(x: Tensor, weights: Any, ranges: _Ranges, out: Tensor | None = None) -> Tensor:
    """[t, in] -> [t, out]; every product writes into its slice of one output."""
    y = x.new_empty(x.shape[0], weights[0].shape[0]) if out is None else out
    for e, a, b in ranges:
        torch.mm(x[a:b], weights[e].t(), out=y[a:b])
    return y


def _input_gradient(grad: Tensor, weights: Any, ranges: _Ranges, out: Tensor | None = None) -> Tensor:
    """[t, out] -> [t, in]."""
    dx = grad.new_empty(grad.shape[0], weights[0].shape[1]) if out is None else out
    for e, a, b in ranges:
        torch.mm(grad[a:b], weights[e], out=dx[a:b])
    return dx


def _weight_gradients(grad: Tensor, x: Tensor, ranges: _Ranges, out: tuple[Tensor, ...]) -> None:
    """E gradients [out, in] of the experts that have rows."""
    for e, a, b in ranges:
        torch.mm(grad[a:b].t(), x[a:b], out=out[e])


def _new_gradients(weights: Any, ranges: _Ranges) -> tuple[Tensor, ...]:
    """E slices of one allocation, zero for experts without rows."""
    dw = weights[0].new_empty(len(weights), *weights[0].shape).unbind(0)
    for e in {*range(len(weights))} - {e for e, _, _ in ranges}:
        dw[e].zero_()
    return dw


class _GroupedLinear(torch.autograd.Function):
    """Saves x and the weights only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.ranges = _ranges(counts)
        return _products(x, weights, ctx.ranges)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        dx = _input_gradient(grad, weights, ctx.ranges) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return (dx, None, *(None for _ in weights))
        dw = _new_gradients(weights, ctx.ranges)
        _weight_gradients(grad, x, ctx.ranges, dw)
        return (dx, None, *dw)


def squared_relu_experts(
    x: Tensor,
    probs: Tensor,
    fc1: list[Any],
    fc2: list[Any],
    counts: list[int],
    *,
    recompute: bool = False,
) -> Tensor:
    """FC1, `weighted_squared_relu`, FC2 of every expert.

    What lies between the products is made for a few experts at a time, in cache, and again in backward. It
    is FP32 (FP64 if x is FP64) and rounded to the dtype of x before each product.

    Args:
        x: [t, in], rows sorted by expert.   probs: [t], weight of each row, applied before FC2.
        fc1: E matrices [f, in].   fc2: E matrices [out, f].
        counts: rows of each expert; they add up to t. Zero is fine.
        recompute: do not keep FC1's output [t, f] for backward but compute it again
            (`--recompute-modules moe_act`).

    Returns:
        [t, out]. Experts without rows get a gradient of zeros, as from `grouped_linear`.

    Raises:
        ValueError: counts do not match x or the weights.
    """
    for weights in (fc1, fc2):
        _check(x, weights, counts)
    result: Tensor = _Experts.apply(x, probs, counts, recompute, *fc1, *fc2)
    return result


def _check(x: Tensor, weights: list[Any], counts: list[int]) -> None:
    if len(counts) != len(weights) or sum(counts) != x.shape[0]:
        raise ValueError(
            f"counts of {len(counts)} experts add up to {sum(counts)}, but there are "
            f"{len(weights)} weights and {x.shape[0]} rows"
        )


class _Block(NamedTuple):
    """Some experts in a row."""

    rows: slice
    ranges: _Ranges  # counted from the first of these rows


def _blocks(x: Tensor, width: int, counts: list[int]) -> list[_Block]:
    """Experts that have rows, together while they are `BLOCK_ELEMENTS` at most; on a GPU all at once."""
    most = BLOCK_ELEMENTS // width if x.device.type == "cpu" else len(x)
    blocks: list[_Block] = []
    first = 0
    for expert, start, end in _ranges(counts):
        if not blocks or end - first > most:
            blocks.append(_Block(slice(start, end), []))
            first = start
        blocks[-1].ranges.append((expert, start - first, end - first))
        blocks[-1] = blocks[-1]._replace(rows=slice(first, end))
    return blocks


class _Experts(torch.autograd.Function):
    """Saves x, probs, the weights and, unless `recompute`, FC1's output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, counts: list[int], recompute: bool, *weights: Tensor
    ) -> Tensor:
        fc1, fc2 = weights[: len(counts)], weights[len(counts) :]
        ctx.counts, ctx.blocks = counts, _blocks(x, len(fc1[0]), counts)
        hidden = None if recompute else x.new_empty(len(x), len(fc1[0]))
        y = x.new_empty(len(x), len(fc2[0]))
        for rows, ranges in ctx.blocks:
            h = _products(x[rows], fc1, ranges, None if hidden is None else hidden[rows])
            _, activation, _ = _activation(h, probs[rows])
            _products(activation, fc2, ranges, y[rows])
        ctx.save_for_backward(x, probs, hidden, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, probs, hidden, *weights = ctx.saved_tensors
        fc1, fc2 = weights[: len(ctx.counts)], weights[len(ctx.counts) :]
        dy, dx, dprobs = dy.contiguous(), torch.empty_like(x), torch.empty_like(probs)
        dfc1, dfc2 = (_new_gradients(w, _ranges(ctx.counts)) for w in (fc1, fc2))
        for rows, ranges in ctx.blocks:
            h = _products(x[rows], fc1, ranges) if hidden is None else hidden[rows]
            positive, activation, weight = _activation(h, probs[rows])
            _weight_gradients(dy[rows], activation, ranges, dfc2)
            along = _input_gradient(dy[rows], fc2, ranges) * positive
            dprobs[rows] = (along * positive).sum(-1)
            dh = along.mul_(2 * weight).to(x.dtype)
            _weight_gradients(dh, x[rows], ranges, dfc1)
            _input_gradient(dh, fc1, ranges, dx[rows])
        return dx, dprobs, None, None, *dfc1, *dfc2


def _activation(hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """relu(hidden) in FP32, relu(hidden)^2 * probs in the dtype of hidden, probs in FP32 as a column."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    positive, weight = F.relu(hidden.to(wide)), probs.to(wide).unsqueeze(-1)
    return positive, (positive * positive).mul_(weight).to(hidden.dtype), weight
