"""Grouped matrix products: rows of x are sorted by expert, each expert multiplies its rows by its matrix.

grouped_linear         y = x W_e^T
squared_relu_experts   y = (relu(x W1_e^T)^2 * probability) W2_e^T, a few experts at a time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers.functional import accumulation_dtype

#: Elements between FC1 and FC2 per block on CPU: 512 KiB in FP32, which stay in the second-level cache.
BLOCK_ELEMENTS = 2**17


def grouped_linear_reference(x: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
    """The definition: split, one `F.linear` per expert, concatenate. Arguments as for `grouped_linear`."""
    return torch.cat([F.linear(part, w) for part, w in zip(torch.split(x, counts), weights, strict=True)])


def grouped_linear(x: Tensor, weights: list[Any], counts: list[int]) -> Tensor:
    """y[rows of expert e] = x[rows of expert e] @ weights[e].T

    Args:
        x: [t, in], rows sorted by expert.
        weights: E matrices [out, in].

    Returns:
        [t, out]. Backward writes into preallocated tensors. Experts without rows get a zero gradient,
        since Megatron's distributed optimizer needs a gradient for every parameter.
    """
    check_counts(x, weights, counts)
    result: Tensor = _GroupedLinear.apply(x, counts, *weights)
    return result


#: (expert, start, end) of experts that have rows.
_ExpertRanges = list[tuple[int, int, int]]


def _expert_ranges(counts: list[int]) -> _ExpertRanges:
    """(expert, start, end) of experts that have rows."""
    ranges, start = [], 0
    for expert, n in enumerate(counts):
        if n:
            ranges.append((expert, start, start + n))
        start += n
    return ranges


def _parts(t: Tensor, ranges: _ExpertRanges) -> tuple[Tensor, ...]:
    """The rows of each range, which follow each other without a gap: one call, not one for each expert."""
    return t.split([end - start for _, start, end in ranges])


def _expert_products(
    x: Tensor, weights: Any, ranges: _ExpertRanges, out: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """x [t, k] times E matrices [k, n], or [n, k] if `transposed` -> [t, n]; each writes into its slice."""
    y = x.new_empty(x.shape[0], weights[0].shape[0 if transposed else 1]) if out is None else out
    for (e, _, _), rows, into in zip(ranges, _parts(x, ranges), _parts(y, ranges), strict=True):
        torch.mm(rows, weights[e].t() if transposed else weights[e], out=into)
    return y


def _grouped_weight_gradients(
    grad: Tensor, x: Tensor, ranges: _ExpertRanges, out: tuple[Tensor, ...]
) -> None:
    """Write the gradient [out, in] of each expert that has rows."""
    for (e, _, _), rows, part in zip(ranges, _parts(grad, ranges), _parts(x, ranges), strict=True):
        torch.mm(rows.t(), part, out=out[e])


def _new_gradients(weights: Any, ranges: _ExpertRanges) -> tuple[Tensor, ...]:
    """E gradients [out, in] in one allocation, zero for experts without rows."""
    dw = weights[0].new_empty(len(weights), *weights[0].shape).unbind(0)
    for e in {*range(len(weights))} - {e for e, _, _ in ranges}:
        dw[e].zero_()
    return dw


class _GroupedLinear(torch.autograd.Function):
    """Saves only x and the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.ranges = _expert_ranges(counts)
        return _expert_products(x, weights, ctx.ranges, transposed=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        dx = _expert_products(grad, weights, ctx.ranges) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return (dx, None, *(None for _ in weights))
        dw = _new_gradients(weights, ctx.ranges)
        _grouped_weight_gradients(grad, x, ctx.ranges, dw)
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

    The activation is computed for a few experts at a time, so that it stays in cache, and recomputed in
    backward. It is FP32 (FP64 if x is FP64) and rounded to the dtype of x before each product.

    Args:
        x: [t, in], rows sorted by expert.   probs: [t], weight of each row, applied before FC2.
        fc1: E matrices [f, in].   fc2: E matrices [out, f].
        recompute: recompute FC1's output [t, f] in backward instead of saving it
            (`--recompute-modules moe_act`).

    Returns:
        [t, out]. Experts without rows get a gradient of zeros, as from `grouped_linear`.
    """
    for weights in (fc1, fc2):
        check_counts(x, weights, counts)
    result: Tensor = _Experts.apply(x, probs, counts, recompute, *fc1, *fc2)
    return result


def check_counts(x: Tensor, weights: Sequence[Any], counts: Sequence[int] | Tensor) -> None:
    """Raise ValueError unless counts match weights and the rows of x; a tensor's sum is not checked."""
    total = x.shape[0] if isinstance(counts, Tensor) else sum(counts)
    if len(counts) != len(weights) or total != x.shape[0]:
        raise ValueError(
            f"counts of {len(counts)} experts add up to {total}, but there are {len(weights)} weights and "
            f"{x.shape[0]} rows"
        )


class _ExpertBlock(NamedTuple):
    """Consecutive experts and their rows."""

    rows: slice
    ranges: _ExpertRanges  # relative to the first of these rows


def _expert_blocks(x: Tensor, width: int, counts: list[int]) -> list[_ExpertBlock]:
    """Consecutive experts that have rows, up to `BLOCK_ELEMENTS` per block; on a GPU one block."""
    most = BLOCK_ELEMENTS // width if x.device.type == "cpu" else len(x)
    blocks: list[_ExpertBlock] = []
    first = 0
    for expert, start, end in _expert_ranges(counts):
        if not blocks or end - first > most:
            blocks.append(_ExpertBlock(slice(start, end), []))
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
        ctx.counts, ctx.blocks = counts, _expert_blocks(x, len(fc1[0]), counts)
        hidden = None if recompute else x.new_empty(len(x), len(fc1[0]))
        y = x.new_empty(len(x), len(fc2[0]))
        for rows, ranges in ctx.blocks:
            out = None if hidden is None else hidden[rows]
            h = _expert_products(x[rows], fc1, ranges, out, transposed=True)
            _, activation, _ = _weighted_activation(h, probs[rows])
            _expert_products(activation, fc2, ranges, y[rows], transposed=True)
        ctx.save_for_backward(x, probs, hidden, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, probs, hidden, *weights = ctx.saved_tensors
        fc1, fc2 = weights[: len(ctx.counts)], weights[len(ctx.counts) :]
        dy, dx, dprobs = dy.contiguous(), torch.empty_like(x), torch.empty_like(probs)
        trained = any(ctx.needs_input_grad[4:])  # not under LoRA that leaves the experts alone
        dfc1: Any
        dfc2: Any
        dfc1, dfc2 = (
            _new_gradients(w, _expert_ranges(ctx.counts)) if trained else (None,) * len(w) for w in (fc1, fc2)
        )
        for rows, ranges in ctx.blocks:
            saved = None if hidden is None else hidden[rows]
            h = _expert_products(x[rows], fc1, ranges, transposed=True) if saved is None else saved
            positive, activation, weight = _weighted_activation(h, probs[rows])
            if trained:
                _grouped_weight_gradients(dy[rows], activation, ranges, dfc2)
            along = _expert_products(dy[rows], fc2, ranges) * positive
            dprobs[rows] = torch.linalg.vecdot(along, positive)
            dh = along.mul_(2 * weight).to(x.dtype)
            if trained:
                _grouped_weight_gradients(dh, x[rows], ranges, dfc1)
            _expert_products(dh, fc1, ranges, dx[rows])
        return dx, dprobs, None, None, *dfc1, *dfc2


def _weighted_activation(hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """relu(hidden) in FP32, relu(hidden)^2 * probs in the dtype of hidden, probs in FP32 as a column."""
    wide = accumulation_dtype(hidden)
    positive, weight = F.relu(hidden.to(wide)), probs.to(wide).unsqueeze(-1)
    return positive, (positive * positive).mul_(weight).to(hidden.dtype), weight
