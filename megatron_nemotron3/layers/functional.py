"""RMS norms and squared ReLU in memory-saving forms; kernels of attention. Plain torch.

    rms_norm                y = x / rms(x) * weight
    gated_group_rms_norm    u = x * silu(z);  y = u / rms(u over each group of channels) * weight
    weighted_squared_relu   y = relu(x)^2 * w, one weight per row (a token's routing probability)

Statistics and intermediate values are FP32 (FP64 inputs stay FP64), rounded once to the dtype of x.
The memory-saving forms save only their inputs (the norm also one reciprocal per group) and are differentiable
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

#: Elements of x per block on CPU; 1 MiB in FP32, so that the chain of operations stays in cache.
BLOCK_ELEMENTS = 2**18
#: Where a backward writes the gradient of an input: returns memory of the input's shape. None: its own.
Place = Callable[[], Tensor] | None


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """dtype of sums, decays and statistics: FP64 if x is FP64, else FP32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attention_of_any_length(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU without cuDNN, which builds a graph for every new length (tens of ms), and torch keeps it."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels) if device.type == "cuda" else nullcontext()


def causal_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention in which the last query sees the last key: q [b, h, n, c]; k, v [b, groups, s, c], s >= n.

    `options`: of torch's scaled_dot_product_attention. No mask is in memory where a flash kernel takes it.
    """
    mask: Any = None
    if q.shape[2] != k.shape[2]:
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: a second

        with _disable_current_modes():  # those that count or fake operations cannot make one
            mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1], **options
    )


class JoinedGradient:
    """One tensor for the gradients of the parts of `split`, so that no copy has to join them.

    A backward that takes its `place` writes there. Gradients that come in other memory are copied. Of x only
    shape, strides and dtype are kept.
    """

    def __init__(self, x: Tensor, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self._like, self._device = torch.empty_like(x, device="meta"), x.device
        self._whole: Tensor | None = None
        self._taken: set[int] = set()

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = _Split.apply(x, self)
        return parts

    def place(self, part: int) -> Callable[[], Tensor]:
        """A function that gives the memory for the gradient of a part, in the shape of the part."""
        return partial(self._part, part)

    def _part(self, part: int) -> Tensor:
        # A second gradient of the same part belongs to another backward.
        if self._whole is None or part in self._taken:
            self._whole, self._taken = torch.empty_like(self._like, device=self._device), set()
        self._taken.add(part)
        return self._whole.split(self.widths, dim=-1)[part]

    def join(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradient of the whole; the next one gets new memory."""
        whole = self._whole if self._whole is not None else torch.empty_like(self._like, device=self._device)
        self._whole, self._taken = None, set()
        for target, gradient in zip(whole.split(self.widths, dim=-1), gradients, strict=True):
            if gradient is None:
                target.zero_()
            elif not _same_memory(gradient, target):
                target.copy_(gradient)
        return whole


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are the same elements. Strides of single elements do not count."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return (
        a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and all(n == 1 or s == t for n, s, t in strides)
    )


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: JoinedGradient) -> tuple[Tensor, ...]:
        ctx.joined = joined
        ctx.set_materialize_grads(False)
        return x.split(joined.widths, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        return ctx.joined.join(gradients), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """RMS norm over the last dimension (arXiv 1910.07467): [..., d], weight [d] -> [..., d], dtype of x."""
    return _RMSNorm.apply(x, None, weight, x.shape[-1], eps, None)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension (arXiv 1607.06450): as `rms_norm`, with bias [d]."""
    wide = accumulation_dtype(x)
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(x.dtype)


def gated_group_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, *, group_size: int, eps: float = 1e-5, z_gradient: Place = None
) -> Tensor:
    """Output norm of the Mamba-2 mixer: first the gate, then RMS norm per group of channels.

    x and the gate before SiLU z [..., d], weight [d] -> [..., d] in the dtype of x. The same as mamba-ssm's
    gated norm with `norm_before_gate=False`.
    """
    _check_norm_groups(x, weight, group_size)
    return _RMSNorm.apply(x, z, weight, group_size, eps, z_gradient)


def weighted_squared_relu(x: Tensor, w: Tensor) -> Tensor:
    """relu(x)^2 * w[:, None]: x [n, d], w [n] -> [n, d] in the dtype of x."""
    if w.shape != x.shape[:-1]:
        raise ValueError(f"w {tuple(w.shape)} must be {tuple(x.shape[:-1])}, one value per row of x")
    return _WeightedSquaredReLU.apply(x, w)


class _RMSNorm(torch.autograd.Function):
    """x, gate z or None, weight, group size, eps, place for the gradient of z -> normalized x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, weight: Tensor, group_size: int, eps: float, z_gradient: Place
    ) -> Tensor:
        wide = accumulation_dtype(x)
        gain = weight.to(wide).unflatten(-1, (-1, group_size))
        x_rows = _as_rows(x)
        z_rows = None if z is None else _as_rows(z)
        y = torch.empty_like(x_rows, memory_format=torch.contiguous_format)
        rstd = torch.empty(len(x_rows), *gain.shape[:1], 1, dtype=wide, device=x.device)
        for rows in _cached_row_blocks(x_rows):
            u, _ = _gated_groups(x_rows, z_rows, rows, gain.shape, wide)
            rstd[rows] = torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
            y[rows] = (u * rstd[rows]).mul_(gain).flatten(1)
        ctx.save_for_backward(x, z, weight, rstd)
        ctx.group_size, ctx.z_gradient = group_size, z_gradient
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight, rstd = ctx.saved_tensors
        gain = weight.to(rstd.dtype).unflatten(-1, (-1, ctx.group_size))
        x_rows, dy_rows = _as_rows(x), _as_rows(dy)
        z_rows = None if z is None else _as_rows(z)
        dx = torch.empty_like(x_rows, memory_format=torch.contiguous_format)
        dz_whole = None
        if z is not None:
            own = ctx.z_gradient is None
            dz_whole = torch.empty_like(dx, dtype=z.dtype).view(z.shape) if own else ctx.z_gradient()
        dz = None if dz_whole is None else dz_whole.view(-1, dz_whole.shape[-1])
        dgain = torch.zeros_like(gain)
        for rows in _cached_row_blocks(x_rows):
            u, silu = _gated_groups(x_rows, z_rows, rows, gain.shape, rstd.dtype)
            unit = u.mul_(rstd[rows])
            dunit = dy_rows[rows].to(rstd.dtype).view(unit.shape)
            dgain += (dunit * unit).sum(0)
            dunit = dunit * gain
            # The gradient's component along u changes only the norm, which the division cancels.
            along = (dunit * unit).mean(-1, keepdim=True)
            du = dunit.addcmul_(unit, along, value=-1).mul_(rstd[rows]).flatten(1)
            if z_rows is None or dz is None or silu is None:
                dx[rows] = du
            else:
                dx[rows] = silu.mul_(du)
                gate = z_rows[rows].to(du.dtype)
                dz[rows] = torch.ops.aten.silu_backward(du.mul_(x_rows[rows]), gate)
        return dx.view(x.shape), dz_whole, dgain.flatten().to(weight.dtype), None, None, None


class _WeightedSquaredReLU(torch.autograd.Function):
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
    """`weighted_squared_relu` without autograd."""
    x_rows, wide = _as_rows(x), w.reshape(-1, 1).to(accumulation_dtype(x))
    y = torch.empty_like(x_rows, memory_format=torch.contiguous_format)
    for rows in _cached_row_blocks(x_rows):
        positive = F.relu(x_rows[rows].to(wide.dtype))
        y[rows] = positive.mul_(positive).mul_(wide[rows])
    return y.view(x.shape)


def weighted_gradients(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [n, d] and w [n] in `weighted_squared_relu`."""
    x_rows, dy_rows, wide = _as_rows(x), _as_rows(dy), w.reshape(-1, 1).to(accumulation_dtype(x))
    dx = torch.empty_like(x_rows, memory_format=torch.contiguous_format)
    dw = torch.empty_like(wide)
    for rows in _cached_row_blocks(x_rows):
        positive = F.relu(x_rows[rows].to(wide.dtype))
        along = dy_rows[rows].to(wide.dtype) * positive
        dw[rows] = (along * positive).sum(-1, keepdim=True)
        dx[rows] = along.mul_(2 * wide[rows])
    return dx.view(x.shape), dw.view(w.shape).to(w.dtype)


def _gated_groups(
    x: Tensor, z: Tensor | None, rows: slice, groups: torch.Size, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """x * silu(z) of some rows in new memory, as [rows, groups, group size], and silu(z)."""
    if z is None:
        return x[rows].to(dtype, copy=True).view(-1, *groups), None
    silu = F.silu(z[rows].to(dtype))
    return (silu * x[rows]).view(-1, *groups), silu


def _as_rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _cached_row_blocks(x: Tensor) -> list[slice]:
    """Slices that cut x [rows, d] into blocks; on a GPU one slice holds all rows."""
    total = len(x)
    step = max(1, BLOCK_ELEMENTS // max(1, x.shape[1]) if x.device.type == "cpu" else total)
    return [slice(row, min(row + step, total)) for row in range(0, total, step)]


def _check_norm_groups(x: Tensor, weight: Tensor, group_size: int) -> None:
    d = x.shape[-1]
    if group_size < 1 or d % group_size:
        raise ValueError(f"{d} channels are not a multiple of group_size={group_size}: use a divisor of {d}")
    if weight.shape != (d,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, x {tuple(x.shape)} needs {(d,)}")
