"""Grouped matrix products on CUDA: forward, input gradient, weight gradient in one kernel launch each.

grouped_linear_cuda         `grouped.grouped_linear`
squared_relu_experts_cuda   `grouped.squared_relu_experts`

Those launch one product per expert, and need the number of its rows on the host. torch's grouped product
(`torch.nn.functional.grouped_mm`) computes all experts in one launch. Its CUTLASS kernel needs BF16, also of
the result, and SM 9 or 10; elsewhere torch copies the offsets to the host and loops, as we do. It needs their
matrices as one tensor [E, out, in]:

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
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers.functional import weighted_gradients, weighted_values
from megatron_nemotron3.layers.grouped import check_counts, grouped_linear, squared_relu_experts
from megatron_nemotron3.precision.settings import library_kernels_enabled

#: Most groups of torch's kernel, and the alignment in bytes that it needs at the start of rows.
MAX_GROUPS, ALIGNMENT = 1024, 16
#: Major compute capabilities that it is compiled for.
MAJOR_CAPABILITIES = (9, 10)
#: Public since torch 2.10.
grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_linear_cuda(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int] | Tensor) -> Tensor:
    """y[rows of expert e] = x[rows of expert e] @ weights[e].T

    Args:
        x: [t, in], rows sorted by expert.
        weights: E matrices [out, in].

    Returns:
        [t, out]. Weight gradients are slices of one tensor [E, out, in]; experts without rows get zeros.
        `grouped.grouped_linear` computes the result if `grouped_mm_problem` reports a problem.
    """
    check_counts(x, weights, counts)
    if x.shape[0] == 0 or grouped_mm_problem(x, weights) is not None:
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
    """FC1, `weighted_squared_relu`, FC2 of every expert. Arguments and result as `squared_relu_experts`.

    `counts` may be a tensor on the device, as for `grouped_linear_cuda`. Saves x, probs, the weights and,
    unless `recompute`, FC1's output; the activation is computed again in backward.
    """
    for weights in (fc1, fc2):
        check_counts(x, weights, counts)
    if x.shape[0] == 0 or any(grouped_mm_problem(x, weights) is not None for weights in (fc1, fc2)):
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


def grouped_mm_problem(x: Tensor, weights: Sequence[Tensor], number: int | None = None) -> str | None:
    """Why torch's grouped product cannot compute these, with the cure; None if it can."""
    number = number or len(weights)
    if not library_kernels_enabled():
        return "NEMOTRON3_GPU_KERNELS=0 turns it off"
    if grouped_mm is None:
        return f"torch {torch.__version__} has no grouped_mm: use torch >= 2.10"
    if x.is_cuda and _compute_capability(x.device)[0] not in MAJOR_CAPABILITIES:
        return "grouped_mm has a kernel for compute capabilities 9 and 10 only; elsewhere torch loops"
    if x.dtype != torch.bfloat16 or any(w.dtype != x.dtype for w in weights):
        return f"x is {x.dtype}, weights {weights[0].dtype}: grouped_mm is fast in BF16 only (--bf16)"
    if number > MAX_GROUPS:
        return f"{number} local experts are over {MAX_GROUPS}: use a larger EP"
    multiple = ALIGNMENT // x.element_size()
    for size in weights[0].shape:
        if size % multiple:
            return f"width {size} is not a multiple of {multiple}: choose an expert TP that makes it so"
    return None


@cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


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
