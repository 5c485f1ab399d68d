"""E2M1, the 4-bit element of NVFP4 and MXFP4: sign, two bits of exponent, one of mantissa.

    code   0   1   2    3    4   5   6   7      + 8: the same, negative (8 is -0)
    value  0   .5  1    1.5  2   3   4   6

There is no infinity and no NaN. Codes are uint8 tensors with one code an element; packed, a byte holds two,
the element of even index in its low half.
"""

from __future__ import annotations

import torch

#: Magnitudes by code; OCP Microscaling Formats (MX) v1.0, table 5.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0

#: The code is the number of these that a magnitude reaches: halfway points, which belong to the neighbor with
#: an even mantissa. `True`: reached when exceeded, the point itself rounds down.
_HALFWAY = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))


def encode(x: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest values, halfway cases to the even mantissa, magnitudes above 6 to 6.

    Args:
        x: any shape; float32, float16 or bfloat16. A NaN gets the code of 0: exclude it before.

    Returns: uint8 of the same shape, 0 to 15. The sign is that of the comparison `x < 0`: -0.0 becomes 0,
        a negative value that rounds to zero becomes 8.
    """
    magnitude = x.abs()
    codes = (x < 0).to(torch.uint8).mul_(8)
    # Seven comparisons and not `bucketize`: they vectorize (120 against 44 million elements/s on one core).
    for point, above in _HALFWAY:
        codes += magnitude > point if above else magnitude >= point
    return codes


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of codes 0 to 15, in `dtype`; exact in every floating-point type of 8 bits or more."""
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype, device=codes.device)
    return values[codes.int()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., n] -> bytes [..., n / 2], column 2 j in the low half of byte j.

    Raises:
        ValueError: n is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} columns cannot be packed two in a byte: use an even number")
    return (codes[..., 1::2] << 4) | codes[..., 0::2]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n / 2] -> codes [..., n]; the inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
