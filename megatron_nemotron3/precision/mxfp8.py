"""Scales of MXFP8 in training: powers of two, exponents rounded up (RCEIL), as TransformerEngine's kernels.

    e   = ceil(log2(amax_b * (1/448)))   of a block of 32; from -127 to 127, stored as the byte e + 127 (E8M0)
    q   = e4m3(x * 2^-e)
    x'  = q * 2^e

Rounding up means that no element of a block saturates. A block of zeros, and one whose exponent is -127
(largest magnitude below 2.7e-36), becomes 0. Infinity and NaN make their block NaN.
"""

from __future__ import annotations

import torch

from megatron_nemotron3.precision.numerics import e4m3
from megatron_nemotron3.precision.numerics.grid import E4M3 as GRID
from megatron_nemotron3.precision.nvfp4 import Scales

__all__ = ["GRID", "exponents", "scales"]

_MANTISSA = 0x7FFFFF
_HALF = 0x400000  # a subnormal amax up to 2^-127 has the exponent -127


def exponents(block_amax: torch.Tensor) -> torch.Tensor:
    """Biased exponents, int32 0 to 254, of largest magnitudes (float32, any shape); 255 for NaN."""
    bits = (block_amax * (1 / e4m3.MAX)).view(torch.int32)
    result = (bits + _MANTISSA) >> 23
    result.masked_fill_(bits <= _HALF, 0).clamp_(max=254)
    return result.masked_fill_(block_amax.isnan(), 255)


def scales(block_amax: torch.Tensor) -> Scales:
    """2^-e and 2^e of blocks; block_amax float32 of any shape. 2^-e is 0 where e is -127."""
    biased = exponents(block_amax)
    # amax - amax is 0, or NaN for what is not finite.
    encode = ((254 - biased) << 23).masked_fill_(biased == 0, 0).view(torch.float32)
    return Scales(encode.add_(block_amax - block_amax), (biased << 23).view(torch.float32))
