"""Grouped matrix products: rows of x are sorted by expert, each expert multiplies its rows by its matrix.

grouped_linear         y = x W_e^T
squared_relu_experts   y = (relu(x W1_e^T)^2 * probability) W2_e^T, a few experts at a time

They launch a product for each expert and need its number of rows on the host. The forms `_cuda` launch one
for all experts: torch's `grouped_mm`, whose CUTLASS kernel takes BF16 on SM 9 and 10, and the matrices as one
tensor [E, out, in]:

    a view    if they lie at equal distances in one allocation, as `one_allocation` arranges. In the buffer of
              Megatron's distributed optimizer addresses decrease from expert to expert: there experts and
              rows come in reverse order (`GroupedExperts.reverse`).
    a copy    otherwise, in forward and again in backward: on an H200 it should take as long as the product at
              330 rows per expert, and a tenth of it at 3,300.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers.functional import accumulation_dtype, weighted_gradients, weighted_values
from megatron_nemotron3.precision.settings import library_kernels_enabled

#: Elements between FC1 and FC2 per block on CPU: 512 KiB in FP32, which stay in the second-level cache.
BLOCK_ELEMENTS = 2**17
#: Most groups of torch's kernel, and the alignment in bytes that it needs at the start of rows.
MAX_GROUPS, ALIGNMENT = 1024, 16
#: Major compute capabilities that it is compiled for.
MAJOR_CAPABILITIES = (9, 10)
#: Public since torch 2.10.
grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_linear(x: Tensor, weights: list[Any], counts: list[int]) -> Tensor:
    """y[rows of expert e] = x[rows of expert e] @ weights[e].T, [t, out].

    Experts without rows get a gradient of zeros: Megatron's distributed optimizer needs one of every
    parameter.

    Args:
        x: [t, in], rows sorted by expert.
        weights: E matrices [out, in].
    """
    check_counts(x, weights, counts)
    result: Tensor = _GroupedLinear.apply(x, counts, *weights)
    return result


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
    """FC1, `weighted_squared_relu`, FC2 of every expert -> [t, out]; gradients as of `grouped_linear`.

    The activation is computed for a few experts at a time, so that it stays in cache, and recomputed in
    backward. It is FP32 (FP64 if x is FP64) and rounded to the dtype of x before each product.

    Args:
        x: [t, in], rows sorted by expert.   probs: [t], weight of each row, applied before FC2.
        fc1: E matrices [f, in].   fc2: E matrices [out, f].
        recompute: recompute FC1's output [t, f] in backward (`--recompute-modules moe_act`).
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


def grouped_linear_cuda(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int] | Tensor) -> Tensor:
    """`grouped_linear` in one launch, or itself unless `grouped_mm_works`.

    `counts` may be a tensor on the device. Weight gradients are slices of one tensor [E, out, in].
    """
    check_counts(x, weights, counts)
    if x.shape[0] == 0 or not grouped_mm_works(x, weights):
        return grouped_linear(x, list(weights), _on_host(counts, x))
    y: Tensor = _GroupedLinearCUDA.apply(x, _ends(counts, x), *weights)
    return y


def squared_relu_experts_cuda(
    x: Tensor,
    probs: Tensor,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    counts: Sequence[int] | Tensor,
    *,
    recompute: bool = False,
) -> Tensor:
    """`squared_relu_experts` in one launch for each product, or itself; `counts` as in `grouped_linear_cuda`.

    Backward computes the activation again.
    """
    for weights in (fc1, fc2):
        check_counts(x, weights, counts)
    if x.shape[0] == 0 or not all(grouped_mm_works(x, weights) for weights in (fc1, fc2)):
        counts = _on_host(counts, x)
        return squared_relu_experts(x, probs, list(fc1), list(fc2), counts, recompute=recompute)
    y: Tensor = _ExpertsCUDA.apply(x, probs, _ends(counts, x), recompute, *fc1, *fc2)
    return y


def _ends(counts: Sequence[int] | Tensor, x: Tensor) -> Tensor:
    """One past the last row of each expert, int32 on the device of x."""
    return torch.as_tensor(counts).to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)


def _on_host(counts: Sequence[int] | Tensor, x: Tensor) -> list[int]:
    if x.shape[0] == 0:
        return [0] * len(counts)  # no need to wait for them
    return counts.tolist() if isinstance(counts, Tensor) else list(counts)


def grouped_mm_works(x: Tensor, weights: Sequence[Tensor], number: int | None = None) -> bool:
    """Whether torch computes them in one launch: in BF16, for aligned widths, where it has a kernel."""
    if not library_kernels_enabled() or grouped_mm is None or (number or len(weights)) > MAX_GROUPS:
        return False
    if x.is_cuda and _compute_capability(x.device)[0] not in MAJOR_CAPABILITIES:
        return False  # torch loops
    if any(one.dtype != torch.bfloat16 for one in (x, *weights)):
        return False
    return not any(size % (ALIGNMENT // x.element_size()) for size in weights[0].shape)


@cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def one_allocation(weights: Sequence[Tensor]) -> Tensor:
    """Move the data of equal matrices [out, in] into one new tensor [E, out, in], and return it.

    The parameters become views of it. Call it at construction: DDP replaces `.data` later.
    """
    together = torch.stack([w.detach() for w in weights])
    for weight, part in zip(weights, together, strict=True):
        weight.data = part
    return together


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """The matrices as one tensor [E, out, in]: a view if there is one."""
    together = view_of(weights)
    return torch.stack([w.detach() for w in weights]) if together is None else together


def view_of(weights: Sequence[Tensor]) -> Tensor | None:
    """The matrices as a view [E, out, in], if they lie at equal, growing distances in one allocation."""
    first = weights[0].detach()
    size, matrix = first.element_size(), first.numel() * first.element_size()
    starts = [w.data_ptr() for w in weights]
    step = starts[1] - starts[0] if len(starts) > 1 else matrix
    if (
        step >= matrix
        and step % ALIGNMENT == starts[0] % ALIGNMENT == 0
        and starts == list(range(starts[0], starts[0] + step * len(starts), step))
        and len({w.untyped_storage().data_ptr() for w in weights}) == 1
        and all(w.is_contiguous() for w in weights)
    ):
        return first.as_strided((len(weights), *first.shape), (step // size, *first.stride()))
    return None


def _aligned_contiguous(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


class _GroupedLinearCUDA(torch.autograd.Function):
    """Saves only x and the weights. `ends` [E]: int32, one past the last row of each expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        x = _aligned_contiguous(x)
        ctx.save_for_backward(x, ends, *weights)
        y: Tensor = grouped_mm(x, stacked(weights).transpose(1, 2), offs=ends)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        dy = _aligned_contiguous(dy)
        dx = grouped_mm(dy, stacked(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return (dx, None, *(None for _ in weights))
        # In this layout (dy transposed, x unchanged) torch's kernel accepts empty groups and any count.
        dw = grouped_mm(dy.t(), x, offs=ends)
        return (dx, None, *dw.unbind(0))


class _ExpertsCUDA(torch.autograd.Function):
    """FC1, activation and FC2. `ends` as for `_GroupedLinearCUDA`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, ends: Tensor, recompute: bool, *weights: Tensor
    ) -> Tensor:
        x = _aligned_contiguous(x)
        fc1, fc2 = weights[: len(weights) // 2], weights[len(weights) // 2 :]
        hidden = grouped_mm(x, stacked(fc1).transpose(1, 2), offs=ends)
        activation = weighted_values(hidden, probs)
        ctx.save_for_backward(x, probs, ends, None if recompute else hidden, *weights)
        y: Tensor = grouped_mm(activation, stacked(fc2).transpose(1, 2), offs=ends)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, probs, ends, hidden, *weights = ctx.saved_tensors
        trained = any(ctx.needs_input_grad[4:])  # not under LoRA that leaves the experts alone
        dy = _aligned_contiguous(dy)
        w1, w2 = (stacked(w) for w in (weights[: len(weights) // 2], weights[len(weights) // 2 :]))
        dw1 = dw2 = (None,) * (len(weights) // 2)
        if hidden is None:
            hidden = grouped_mm(x, w1.transpose(1, 2), offs=ends)
        if trained:
            dw2 = grouped_mm(dy.t(), weighted_values(hidden, probs), offs=ends).unbind(0)
        dhidden, dprobs = weighted_gradients(hidden, probs, grouped_mm(dy, w2, offs=ends))
        if trained:
            dw1 = grouped_mm(dhidden.t(), x, offs=ends).unbind(0)
        dx = grouped_mm(dhidden, w1, offs=ends) if ctx.needs_input_grad[0] else None
        return (dx, dprobs, None, None, *dw1, *dw2)
