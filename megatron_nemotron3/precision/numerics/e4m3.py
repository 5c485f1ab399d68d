"""E4M3, the 8-bit element of FP8 and the block scale of NVFP4: float8_e4m3fn of torch, as bits.

The largest value is 448, the smallest normal one 2^-6, the smallest positive one 2^-9. There is no infinity;
0x7f and 0xff are NaN. Bits are uint8 tensors, which every device and every version of `torch.save` supports.
"""

from __future__ import annotations

import torch

MAX = 448.0
#: The smallest positive value, a subnormal.
TINY = 2.0**-9


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest values, ties to the even mantissa, magnitudes above 448 to 448; return bits."""
    # torch's cast turns values that are too large into NaN.
    return x.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(bits: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of bits, in `dtype`; exact from bfloat16 on."""
    return bits.view(torch.float8_e4m3fn).to(dtype)
