"""relu(x)^2 * w in one Triton kernel each for forward and backward.

The specification is `functional.weighted_squared_relu`. The operation is memory-bound: forward reads x and
writes y once, backward reads x and dy and writes dx once. Plain torch runs several operations over FP32
copies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers import functional

#: Columns per step of a program, which loops over its row.
BLOCK = 1024


def weighted_squared_relu(x: Tensor, w: Tensor) -> Tensor:
    """relu(x)^2 * w[:, None], computed in FP32 and rounded once; saves x and w.

    Args:
        x: [t, f], tokens sorted by expert, before the activation.
        w: [t], routing probability of each row.

    Returns:
        [t, f] in the dtype of x. FP64 is computed in plain torch.

    Raises:
        ValueError: w is not one value per row of a matrix x.
    """
    if x.dim() != 2 or w.shape != x.shape[:1]:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} must be [t, f] and [t]")
    if torch.float64 in (x.dtype, w.dtype):
        return functional.weighted_squared_relu(x, w)
    y: Tensor = _TritonWeightedSquaredReLU.apply(x, w)
    return y


class _TritonWeightedSquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return weighted_values(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return weighted_gradients(x, w, dy)


def weighted_values(x: Tensor, w: Tensor) -> Tensor:
    """`weighted_squared_relu` without autograd; not for FP64."""
    x = functional.unit_stride(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_per_row(_forward_kernel, x, x, w, y, x.stride(0), w.stride(0))
    return y


def weighted_gradients(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [t, f] and w [t] in `weighted_squared_relu`; not for FP64."""
    x, dy = functional.unit_stride(x), functional.unit_stride(dy)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    _launch_per_row(_backward_kernel, x, x, w, dy, dx, dw, x.stride(0), w.stride(0), dy.stride(0))
    return dx, dw


def _launch_per_row(kernel: Any, x: Tensor, *arguments: Any) -> None:
    """Launch one program per row of x [t, f]; nothing if there are no rows, as CUDA refuses an empty grid."""
    rows, width = x.shape
    if rows:
        block = min(BLOCK, triton.next_power_of_2(width))
        with functional.on_device_of(x):
            kernel[(rows,)](*arguments, width, BLOCK=block, num_warps=max(1, block // 256))


@triton.jit
def _forward_kernel(x, w, y, x_s, w_s, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(w + row * w_s).to(tl.float32)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        positive = tl.load(x + row * x_s + col, mask=col < width, other=0.0).to(tl.float32)
        # maximum(x, 0) may turn NaN into 0, which would hide a divergence.
        positive = tl.where(positive <= 0, 0.0, positive)
        tl.store(y + row * width + col, positive * positive * weight, mask=col < width)


@triton.jit
def _backward_kernel(x, w, dy, dx, dw, x_s, w_s, dy_s, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(w + row * w_s).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < width
        positive = tl.load(x + row * x_s + col, mask=inside, other=0.0).to(tl.float32)
        positive = tl.where(positive <= 0, 0.0, positive)
        along = tl.load(dy + row * dy_s + col, mask=inside, other=0.0).to(tl.float32) * positive
        total += along * positive
        tl.store(dx + row * width + col, 2 * weight * along, mask=inside)
    tl.store(dw + row, tl.sum(total, 0))
