"""E2M1, the 4-bit element of NVFP4 and MXFP4: sign, two bits of exponent, one of mantissa.

    code   0   1   2    3    4   5   6   7      + 8: the same, negative (8 is -0)
    value  0   .5  1    1.5  2   3   4   6

There is no infinity and no NaN. Codes are uint8 tensors with one code per element. Packed, a byte holds two
codes, that of even index in its low half.
"""

from __future__ import annotations

import torch

#: Magnitudes by code (OCP Microscaling Formats specification, FP4).
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest values, ties to the even mantissa, magnitudes above 6 to 6; return codes."""
    magnitude = x.abs().clamp_(max=MAX)
    # Values are multiples of 1/2 up to 2, of 1 up to 4, of 2 up to 6. On each of these grids `round` takes
    # ties to the even multiple, which has the even mantissa. The code is the smallest of the three positions.
    # (Faster than comparing with seven thresholds.)
    codes = (magnitude * 2).round_()
    codes = torch.minimum(codes, magnitude.round().add_(2))
    codes = torch.minimum(codes, magnitude.mul_(0.5).round_().add_(4))
    return (x < 0).to(torch.uint8).mul_(8).add_(codes.to(torch.uint8))


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of codes 0 to 15, in `dtype`; exact from float16 and bfloat16 on."""
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype, device=codes.device)
    return values[codes.int()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., n] -> bytes [..., n / 2], column 2 j in the low half of byte j."""
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} columns cannot be packed two in a byte: use an even number")
    return (codes[..., 1::2] << 4) | codes[..., 0::2]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n / 2] -> codes [..., n]; the inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
