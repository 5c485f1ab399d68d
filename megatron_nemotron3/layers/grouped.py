"""Grouped matrix product: rows of x are sorted by expert, expert e multiplies its rows by its matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def grouped_linear_reference(x: torch.Tensor, weights: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """The definition: split, one `F.linear` an expert, concatenate. Shapes as `grouped_linear`."""
    return torch.cat([F.linear(part, w) for part, w in zip(torch.split(x, counts), weights, strict=True)])


def grouped_linear(x: torch.Tensor, weights: list[Any], counts: list[int]) -> torch.Tensor:
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
    if len(counts) != len(weights) or sum(counts) != x.shape[0]:
        raise ValueError(
            f"counts of {len(counts)} experts add up to {sum(counts)}, but there are "
            f"{len(weights)} weights and {x.shape[0]} rows"
        )
    result: torch.Tensor = _GroupedLinear.apply(x, counts, *weights)
    return result


def _ranges(counts: list[int]) -> list[tuple[int, int, int]]:
    """(expert, start, end) of experts that have rows."""
    ranges, start = [], 0
    for expert, n in enumerate(counts):
        if n:
            ranges.append((expert, start, start + n))
        start += n
    return ranges


class _GroupedLinear(torch.autograd.Function):
    """Saves x and the weights only; every product writes into its slice of one output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: list[int], *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.ranges = _ranges(counts)
        y = x.new_empty(x.shape[0], weights[0].shape[0])
        for e, a, b in ctx.ranges:
            torch.mm(x[a:b], weights[e].t(), out=y[a:b])
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        if dx is not None:
            for e, a, b in ctx.ranges:
                torch.mm(grad[a:b], weights[e], out=dx[a:b])
        if not any(ctx.needs_input_grad[2:]):
            return (dx, None, *(None for _ in weights))
        # One allocation for all experts; its slices are the contiguous gradients.
        dw = x.new_empty(len(weights), *weights[0].shape)
        for e in {*range(len(weights))} - {e for e, _, _ in ctx.ranges}:
            dw[e].zero_()
        for e, a, b in ctx.ranges:
            torch.mm(grad[a:b].t(), x[a:b], out=dw[e])
        return (dx, None, *dw.unbind(0))
