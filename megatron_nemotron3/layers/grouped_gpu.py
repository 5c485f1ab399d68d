"""Grouped matrix product on CUDA: forward, input gradient, weight gradient in one kernel launch each.

`grouped.grouped_linear` launches one product per expert each time. torch's grouped product
(`torch.nn.functional.grouped_mm`; its CUTLASS kernel is for BF16 on SM 9.0 and later) takes all experts at
once. It wants their matrices as one tensor [E, out, in]:

    free      the matrices lie at equal distances in one allocation (`one_allocation` makes it so): a
              view. Megatron's distributed optimizer moves parameters into a buffer, last registered first,
              where addresses fall from expert to expert: a copy, then
    a copy    otherwise they are stacked, in forward and again in backward: 2 * E * out * in elements read
              and written, against 2 * t * out * in multiply-adds a product. For t / E rows an expert the
              copy moves 4 / (t / E) bytes per multiply-add: by these numbers as long as the product at 330
              rows on an H200 (4.8 TB/s, 790 TFLOP/s), a tenth of it at 3,300. It is not kept for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers.grouped import grouped_linear

#: torch's kernel handles at most this many groups, and wants rows to start at multiples of this many bytes.
MAX_GROUPS, ALIGNMENT = 1024, 16
#: Public since torch 2.10.
_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_linear_cuda(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int] | Tensor) -> Tensor:
    """y[rows of expert e] = x[rows of expert e] @ weights[e].T

    Args:
        x: [t, in], rows sorted by expert.
        weights: E matrices [out, in].
        counts: rows of each expert; they add up to t, zero is fine. As a tensor on the device of x no copy
            to the host is made, and the sum is not checked: rows over it would be undefined.

    Returns:
        [t, out]. Weight gradients are slices of one tensor [E, out, in]; experts without rows get zeros.
        Where `grouped_mm_problem` finds one, `grouped.grouped_linear` computes the result.

    Raises:
        ValueError: counts do not match x or weights.
    """
    total = x.shape[0] if isinstance(counts, Tensor) else sum(counts)
    if len(counts) != len(weights) or total != x.shape[0]:
        raise ValueError(
            f"counts of {len(counts)} experts add up to {total}, but there are "
            f"{len(weights)} weights and {x.shape[0]} rows"
        )
    if x.shape[0] == 0 or grouped_mm_problem(x, weights) is not None:
        counts = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        return grouped_linear(x, list(weights), counts)
    ends = torch.as_tensor(counts).to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    y: Tensor = _GroupedLinear.apply(x, ends, *weights)
    return y


def grouped_mm_problem(x: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Why torch's grouped product cannot take these, with the cure, or None."""
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
    """Move the data of equal matrices [out, in] into one new tensor [E, out, in], which is returned.

    Each parameter stays itself and becomes a view of its slice, so optimizers, checkpoints and hooks see no
    difference. For construction time: whoever replaces `.data` later (DDP) decides about the layout anew.
    """
    together = torch.stack([w.detach() for w in weights])
    for weight, part in zip(weights, together, strict=True):
        weight.data = part
    return together


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """[E, out, in]: a view if the matrices lie at equal distances in one allocation, else a copy."""
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


def _aligned(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


class _GroupedLinear(torch.autograd.Function):
    """Saves x and the weights only. `ends` [E]: int32, the row behind each expert's last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        x = _aligned(x)
        ctx.save_for_backward(x, ends, *weights)
        y: Tensor = _grouped_mm(x, stacked(weights).transpose(1, 2), offs=ends)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        dy = _aligned(dy)
        dx = _grouped_mm(dy, stacked(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return (dx, None, *(None for _ in weights))
        # dy transposed and x as it is: the layout in which torch's kernel takes empty groups and any count.
        dw = _grouped_mm(dy.t(), x, offs=ends)
        return (dx, None, *dw.unbind(0))
