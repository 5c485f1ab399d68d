"""Grouped matrix product: rows of x are sorted by expert, expert e multiplies its rows by its matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_nemotron3.layers.functional import weighted_squared_relu


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


def _products(x: torch.Tensor, weights: Any, ranges: _Ranges) -> torch.Tensor:
    """[t, in] -> [t, out]; every product writes into its slice of one output."""
    y = x.new_empty(x.shape[0], weights[0].shape[0])
    for e, a, b in ranges:
        torch.mm(x[a:b], weights[e].t(), out=y[a:b])
    return y


def _input_gradient(grad: torch.Tensor, weights: Any, ranges: _Ranges) -> torch.Tensor:
    """[t, out] -> [t, in]."""
    dx = grad.new_empty(grad.shape[0], weights[0].shape[1])
    for e, a, b in ranges:
        torch.mm(grad[a:b], weights[e], out=dx[a:b])
    return dx


def _weight_gradients(
    grad: torch.Tensor, x: torch.Tensor, weights: Any, ranges: _Ranges
) -> tuple[torch.Tensor, ...]:
    """E gradients [out, in]: slices of one allocation, zero for experts without rows."""
    dw = x.new_empty(len(weights), *weights[0].shape)
    for e in {*range(len(weights))} - {e for e, _, _ in ranges}:
        dw[e].zero_()
    for e, a, b in ranges:
        torch.mm(grad[a:b].t(), x[a:b], out=dw[e])
    return dw.unbind(0)


class _GroupedLinear(torch.autograd.Function):
    """Saves x and the weights only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: list[int], *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.ranges = _ranges(counts)
        return _products(x, weights, ctx.ranges)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        dx = _input_gradient(grad, weights, ctx.ranges) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return (dx, None, *(None for _ in weights))
        return (dx, None, *_weight_gradients(grad, x, weights, ctx.ranges))


def grouped_squared_relu_linear(
    hidden: torch.Tensor, probs: torch.Tensor, weights: list[Any], counts: list[int]
) -> torch.Tensor:
    """`grouped_linear(weighted_squared_relu(hidden, probs), weights, counts)` without keeping the activation.

    Backward computes it again from `hidden` (`--recompute-modules moe_act`). One function, because a
    checkpoint around the activation alone saves nothing: FC2 keeps what it gives.

    Args:
        hidden: [t, f] output of FC1; probs: [t]; weights: E matrices [out, f]; counts: rows of each.
    """
    result: torch.Tensor = _ActivatedGroupedLinear.apply(hidden, probs, counts, *weights)
    return result


class _ActivatedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, probs: torch.Tensor, counts: list[int], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, probs, *weights)
        ctx.ranges = _ranges(counts)
        return _products(weighted_squared_relu(hidden, probs), weights, ctx.ranges)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, probs, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        with torch.enable_grad():
            leaves = (hidden.detach().requires_grad_(), probs.detach().requires_grad_())
            activation = weighted_squared_relu(*leaves)
        dhidden, dprobs = torch.autograd.grad(activation, leaves, _input_gradient(grad, weights, ctx.ranges))
        return (dhidden, dprobs, None, *_weight_gradients(grad, activation.detach(), weights, ctx.ranges))
