"""Grouped matrix product on CUDA: forward, input gradient, weight gradient in one kernel launch each.

`grouped.grouped_linear` launches one product per expert. torch's grouped product
(`torch.nn.functional.grouped_mm`; its CUTLASS kernel needs BF16 and SM 9.0 or later) computes all experts in
one launch. It needs their matrices as one tensor [E, out, in]:

    a view    if the matrices lie at equal distances in one allocation, as `one_allocation` arranges.
              Megatron's distributed optimizer moves parameters into a buffer, last registered first:
              addresses then decrease from expert to expert, and a copy is needed.
    a copy    otherwise, in forward and again in backward: 2 * E * out * in elements read and written, against
              2 * t * out * in multiply-adds per product. With t / E rows per expert that is 4 / (t / E) bytes
              per multiply-add. On an H200 (4.8 TB/s, 790 TFLOP/s) the copy should take as long as the product
              at 330 rows per expert, and a tenth of it at 3,300. It is not saved for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers.grouped import check_counts, grouped_linear

#: Most groups of torch's kernel, and the alignment in bytes that it needs at the start of rows.
MAX_GROUPS, ALIGNMENT = 1024, 16
#: Public since torch 2.10.
_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_linear_cuda(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int] | Tensor) -> Tensor:
    """y[rows of expert e] = x[rows of expert e] @ weights[e].T

    Args:
        x: [t, in], rows sorted by expert.
        weights: E matrices [out, in].
        counts: rows of each expert; they add up to t, a count may be 0. A tensor on the device of x avoids a
            copy to the host; its sum is then not checked, and further rows would be undefined.

    Returns:
        [t, out]. Weight gradients are slices of one tensor [E, out, in]; experts without rows get zeros.
        `grouped.grouped_linear` computes the result if `grouped_mm_problem` reports a problem.

    Raises:
        ValueError: counts do not match x or weights.
    """
    check_counts(x, weights, counts)
    if x.shape[0] == 0 or grouped_mm_problem(x, weights) is not None:
        counts = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        return grouped_linear(x, list(weights), counts)
    ends = torch.as_tensor(counts).to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    y: Tensor = _GroupedLinearCUDA.apply(x, ends, *weights)
    return y


def grouped_mm_problem(x: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Why torch's grouped product cannot compute these, with the cure; None if it can."""
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped_mm: use torch >= 2.10"
    if x.dtype != torch.bfloat16 or any(w.dtype != x.dtype for w in weights):
        return f"x is {x.dtype}, weights {weights[0].dtype}: grouped_mm is fast in BF16 only (--bf16)"
    if len(weights) > MAX_GROUPS:
        return f"{len(weights)} local experts are over {MAX_GROUPS}: use a larger EP"
    multiple = ALIGNMENT // x.element_size()
    for size in weights[0].shape:
        if size % multiple:
            return f"width {size} is not a multiple of {multiple}: choose an expert TP that makes it so"
    return None


def one_allocation(weights: Sequence[Tensor]) -> Tensor:
    """Move the data of equal matrices [out, in] into one new tensor [E, out, in], and return it.

    The parameters keep their identity and become views of its slices, so optimizers, checkpoints and hooks
    see no difference. Call it at construction: DDP replaces `.data` later and may choose another layout.
    """
    together = torch.stack([w.detach() for w in weights])
    for weight, part in zip(weights, together, strict=True):
        weight.data = part
    return together


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """The matrices as one tensor [E, out, in]: a view if they lie at equal distances in one allocation."""
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
    return torch.stack([w.detach() for w in weights])


def _aligned_contiguous(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


class _GroupedLinearCUDA(torch.autograd.Function):
    """Saves only x and the weights. `ends` [E]: int32, one past the last row of each expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        x = _aligned_contiguous(x)
        ctx.save_for_backward(x, ends, *weights)
        y: Tensor = _grouped_mm(x, stacked(weights).transpose(1, 2), offs=ends)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        dy = _aligned_contiguous(dy)
        dx = _grouped_mm(dy, stacked(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return (dx, None, *(None for _ in weights))
        # In this layout (dy transposed, x unchanged) torch's kernel accepts empty groups and any count.
        dw = _grouped_mm(dy.t(), x, offs=ends)
        return (dx, None, *dw.unbind(0))
