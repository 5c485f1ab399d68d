"""Definitions of the fast forms of `layers.functional`, `conv` and `grouped`; backward is autograd's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.layers.chunked_scan import document_starts
from megatron_nemotron3.layers.conv import ACTIVATIONS, _checked_taps
from megatron_nemotron3.layers.functional import _check_norm_groups, accumulation_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; arguments as for `rms_norm`."""
    wide = x.to(accumulation_dtype(x))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight.to(wide.dtype)).to(x.dtype)


def gated_group_rms_norm_reference(
    x: Tensor, z: Tensor, weight: Tensor, *, group_size: int, eps: float = 1e-5
) -> Tensor:
    """The definition of `gated_group_rms_norm`; backward by autograd."""
    _check_norm_groups(x, weight, group_size)
    wide = x.to(accumulation_dtype(x))
    gated = (wide * F.silu(z.to(wide.dtype))).unflatten(-1, (-1, group_size))
    rstd = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return ((gated * rstd).flatten(-2) * weight.to(wide.dtype)).to(x.dtype)


def weighted_squared_relu_reference(x: Tensor, w: Tensor) -> Tensor:
    """The definition of `weighted_squared_relu`; backward by autograd."""
    wide = x.to(accumulation_dtype(x))
    return (F.relu(wide).square() * w.to(wide.dtype).unsqueeze(-1)).to(x.dtype)


def grouped_linear_reference(x: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
    """The definition: split, one `F.linear` per expert, concatenate. Arguments as for `grouped_linear`."""
    return torch.cat([F.linear(part, w) for part, w in zip(torch.split(x, counts), weights, strict=True)])


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Tap by tap, with k shifted copies. Arguments, result and errors as for `causal_conv1d`."""
    taps = _checked_taps(x, weight, bias, activation, seq_idx)
    s, k = x.shape[1], taps.shape[1]
    acc = accumulation_dtype(x)
    padded = F.pad(x.to(acc), (0, 0, k - 1, 0))
    document = torch.zeros_like(x[..., 0], dtype=torch.long)
    if seq_idx is not None:
        document = document_starts(seq_idx).cumsum(1)
    document_padded = F.pad(document, (k - 1, 0))
    y = x.new_zeros(x.shape, dtype=acc) if bias is None else bias.to(acc).expand(x.shape)
    for j in range(k):
        same = document_padded[:, j : j + s] == document
        y = y + torch.where(same.unsqueeze(-1), padded[:, j : j + s], 0.0) * taps[:, j].to(acc)
    return (F.silu(y) if ACTIVATIONS[activation] else y).to(x.dtype)
