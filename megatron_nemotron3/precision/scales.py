"""Scales of NVFP4 and MXFP8 in training, and the random Hadamard transform. All arithmetic is FP32.

NVFP4, bit for bit as in TransformerEngine >= 2.14:

    S   = min(2688 / amax, FLT_MAX)              2688 = 6 * 448; 1 if that is 0
    s_b = e4m3(min(amax_b * (S * (1/6)), 448))   of block b; may underflow to 0, then the block becomes 0
    e_b = min(1 / (s_b * (1/S)), FLT_MAX)
    q   = e2m1(clamp(x * e_b, -6, 6))
    x'  = q * (s_b * amax * (1/2688))

The order of operations is part of the format. TransformerEngine <= 2.13 used another order, and up to 0.7 %
of its scales differ. (Inference weights are scaled by `numerics.nvfp4`, in ModelOpt's order.)

Below amax = 2688 / FLT_MAX = 7.9e-36 S cannot grow any more while x' still uses amax: values shrink, as in
TransformerEngine. An infinite amax makes x' infinite or NaN; a NaN makes all of x' NaN.

Four-over-six, an option for weights (the paper "Four Over Six"), as in TransformerEngine's
`nvfp4_4over6` with its defaults. 6 is far from its neighbour 4, so a block may be closer to x if its largest
magnitude becomes 4. Scales up to 448 * 256 / 448 leave room for a block scale that is 1.5 times as large:

    S   = min(1536 / amax, FLT_MAX)              1536 = 6 * 256
    s_6 = e4m3(amax_b / 6 * S)                   s_4 = e4m3(amax_b / 6 * S * 1.5)
    E   = sum |q * s * amax / 1536 - x|          of both, over the block; s_4 is taken if its E is smaller

Sums are in the order of the kernel: along the row, then rows of a tile in pairs 8, 4, 2 and 1 apart.

MXFP8, powers of two with exponents rounded up (RCEIL), as in TransformerEngine's kernels:

    e   = ceil(log2(amax_b * (1/448)))   of a block of 32; from -127 to 127, stored as the byte e + 127 (E8M0)
    q   = e4m3(x * 2^-e)
    x'  = q * 2^e

Rounding up means that no element of a block saturates. A block of zeros, and one whose exponent is -127
(largest magnitude below 2.7e-36), becomes 0. Infinity and NaN make their block NaN.

The random Hadamard transform multiplies blocks of 16 by diag(signs) H / 4, where H is Sylvester's matrix of
order 16. This matrix is orthogonal: rotating both operands of a matmul along the contracted axis changes
nothing but rounding. The signs are fixed, and equal to the ones that TransformerEngine hard-codes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from megatron_nemotron3.precision.numerics import NVFP4_BLOCK, e2m1, e4m3
from megatron_nemotron3.precision.numerics.grid import E4M3
from megatron_nemotron3.precision.numerics.nvfp4 import FOUR_OVER_SIX_MAX, MAX

_FLT_MAX = torch.finfo(torch.float32).max
_MANTISSA = 0x7FFFFF
_HALF = 0x400000  # a subnormal amax up to 2^-127 has the exponent -127
#: Signs of the random Hadamard transform.
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class Scales(NamedTuple):
    """encode: what x is multiplied by before rounding. block: what the rounded value is multiplied by.
    Both float32, of the shape of the block grid."""

    encode: torch.Tensor
    block: torch.Tensor


def nvfp4_scales(block_amax: torch.Tensor, amax: torch.Tensor) -> Scales:
    """NVFP4 scales of blocks."""
    # Tensor by tensor: torch turns `2688.0 / amax` into `amax.reciprocal() * 2688.0`, with other bits for
    # every fourth amax.
    whole = torch.full_like(amax, MAX).div_(amax).clamp_(max=_FLT_MAX)
    whole.add_(whole == 0)  # an infinite amax has 1
    block = block_amax * (whole * (1 / e2m1.MAX))
    return _rounded_scales(block, whole)


def four_over_six_scales(block_amax: torch.Tensor, amax: torch.Tensor) -> tuple[Scales, Scales]:
    """Scales of blocks whose largest magnitude becomes 6, and 4; arguments as `nvfp4_scales`."""
    whole = torch.full_like(amax, FOUR_OVER_SIX_MAX).div_(amax).clamp_(max=_FLT_MAX)
    whole.add_(whole == 0)
    base = block_amax / torch.full_like(block_amax, e2m1.MAX) * whole  # not times 1/6
    return _rounded_scales(base.clone(), whole), _rounded_scales(base * 1.5, whole)


def _rounded_scales(block: torch.Tensor, whole: torch.Tensor) -> Scales:
    """Block scales rounded to E4M3 in place, and what x is multiplied by."""
    E4M3.round_(block, torch.empty_like(block))
    return Scales((block * whole.reciprocal()).reciprocal_().clamp_(max=_FLT_MAX), block)


def nvfp4_steps(block: torch.Tensor, amax: torch.Tensor, largest: float = MAX) -> torch.Tensor:
    """s_b * amax * (1/2688), in the order of TransformerEngine's dequantization kernel."""
    return (block * amax).mul_(1 / largest)


def product_scale(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Scale of a matmul of two operands in units (q * s_b): amax_a * amax_b * (1 / 2688^2)."""
    return (a * b).mul_(1 / (MAX * MAX))


def mxfp8_exponents(block_amax: torch.Tensor) -> torch.Tensor:
    """Biased exponents, int32 0 to 254, of largest magnitudes (float32, any shape); 255 for NaN."""
    bits = (block_amax * (1 / e4m3.MAX)).view(torch.int32)
    result = (bits + _MANTISSA) >> 23
    result.masked_fill_(bits <= _HALF, 0).clamp_(max=254)
    return result.masked_fill_(block_amax.isnan(), 255)


def mxfp8_scales(block_amax: torch.Tensor) -> Scales:
    """2^-e and 2^e of blocks; block_amax float32 of any shape. 2^-e is 0 where e is -127."""
    biased = mxfp8_exponents(block_amax)
    # amax - amax is 0, or NaN for what is not finite.
    encode = ((254 - biased) << 23).masked_fill_(biased == 0, 0).view(torch.float32)
    return Scales(encode.add_(block_amax - block_amax), (biased << 23).view(torch.float32))


@functools.lru_cache(maxsize=8)
def hadamard_matrix(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """diag(HADAMARD_SIGNS) H / 4, [16, 16]; a row vector times it is the transform. Exact in every dtype."""
    # Entry (i, j) of Sylvester's matrix is the parity of the bits that i and j share.
    entries = [
        [sign * (-1) ** (i & j).bit_count() / 4 for j in range(NVFP4_BLOCK)]
        for i, sign in enumerate(HADAMARD_SIGNS)
    ]
    with torch.inference_mode(False):  # the cached tensor outlives the caller's mode
        return torch.tensor(entries, dtype=dtype, device=device)


def rotate(blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Transform blocks along axis 1.

    Args:
        blocks: float32 [n, 16] or [n, 16, k], contiguous.
    """
    h = hadamard_matrix(blocks.device)
    if blocks.ndim == 2:
        return torch.mm(blocks, h, out=out)
    return torch.bmm(h.t().expand(len(blocks), NVFP4_BLOCK, NVFP4_BLOCK), blocks, out=out)
