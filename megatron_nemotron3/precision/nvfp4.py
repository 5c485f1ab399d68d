"""Scales of NVFP4 in training, bit for bit those of TransformerEngine >= 2.14. All arithmetic is FP32.

    S   = min(2688 / amax, FLT_MAX)              2688 = 6 * 448; 1 if that is 0
    s_b = e4m3(min(amax_b * (S * (1/6)), 448))   of block b; may underflow to 0, then the block becomes 0
    e_b = min(1 / (s_b * (1/S)), FLT_MAX)
    q   = e2m1(clamp(x * e_b, -6, 6))
    x'  = q * (s_b * amax * (1/2688))

The order of operations is part of the format. TransformerEngine <= 2.13 had another: up to 0.7 % of its
scales differ. (Weights for inference are scaled by `numerics.nvfp4`, in ModelOpt's order.)

Below amax = 2688 / FLT_MAX = 7.9e-36 S cannot grow any more while x' still uses amax: values shrink, as
there. An infinite amax makes x' infinite or NaN, a NaN makes all of x' NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_nemotron3.precision.numerics import e2m1, e4m3
from megatron_nemotron3.precision.numerics.grid import E2M1 as GRID
from megatron_nemotron3.precision.numerics.grid import E4M3

__all__ = ["GRID", "MAX", "Scales", "product_scale", "scales"]

#: The largest value of an element times a block scale.
MAX = e2m1.MAX * e4m3.MAX
_FLT_MAX = torch.finfo(torch.float32).max


class Scales(NamedTuple):
    """encode: what x is multiplied by before rounding. block: what the rounded value is multiplied by.
    Both float32, of the shape of the block grid."""

    encode: torch.Tensor
    block: torch.Tensor


def scales(block_amax: torch.Tensor, amax: torch.Tensor) -> Scales:
    """Scales of blocks.

    Args:
        block_amax: largest magnitudes of the blocks, float32, any shape.
        amax: of the tensor, float32, [] or a shape that broadcasts.
    """
    # Tensor by tensor: torch turns `2688.0 / amax` into `amax.reciprocal() * 2688.0`, with other bits for
    # every fourth amax.
    whole = torch.full_like(amax, MAX).div_(amax).clamp_(max=_FLT_MAX)
    whole.add_(whole == 0)  # an infinite amax has 1
    block = block_amax * (whole * (1 / e2m1.MAX))
    E4M3.round_(block, torch.empty_like(block))
    encode = (block * whole.reciprocal()).reciprocal_().clamp_(max=_FLT_MAX)
    return Scales(encode, block)


def steps(block: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """s_b * amax * (1/2688), in the order of TransformerEngine's dequantization kernel."""
    return (block * amax).mul_(1 / MAX)


def product_scale(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What a product of two operands in units (q * s_b) is multiplied by: amax_a * amax_b * (1 / 2688^2).

    Args:
        a, b: amax of the operands, float32, shapes that broadcast.
    """
    return (a * b).mul_(1 / (MAX * MAX))
