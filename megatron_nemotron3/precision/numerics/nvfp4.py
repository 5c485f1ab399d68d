"""NVFP4 weights for inference engines: E2M1 elements with scales on two levels.

Along the last axis every 16 elements share an E4M3 scale, and the whole tensor has an FP32 scale:

    value = E2M1 code * block scale * tensor scale

Scales come from the largest magnitudes ("max calibration"). They are computed in FP32, in the order of NVIDIA
ModelOpt 0.47 (`NVFP4QTensor`), so that bytes are equal:

    tensor scale = amax / 2688                          2688 = 6 * 448
    block scale  = e4m3(amax of the block / (6 * tensor scale)), from 2^-9 to 448
    code         = e2m1(x / (block scale * tensor scale))

Training computes scales differently, see `precision.scales`: TransformerEngine multiplies by reciprocals and
lets block scales underflow.

Corner cases: a block of zeros has scale 1, as in ModelOpt. A tensor of zeros is scaled as if its amax were 1,
where ModelOpt writes NaN. Blocks below 2^-9 / 448 of the largest keep the scale 2^-9 and round to zero.
Infinity and NaN are refused, and so is an amax whose tensor scale is not a normal FP32 number.

All functions work row by row: bands of rows with the same tensor scale give the bytes of the whole weight.
"""

from __future__ import annotations

import torch

from megatron_nemotron3.precision.numerics import NVFP4_BLOCK as BLOCK
from megatron_nemotron3.precision.numerics import e2m1, e4m3

#: The largest value that a tensor scale of 1 can represent.
MAX = e2m1.MAX * e4m3.MAX
#: For a smaller amax the tensor scale would be a subnormal FP32 number or 0.
MIN_AMAX = MAX * torch.finfo(torch.float32).tiny


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor or of a band of it, float32 []."""
    largest = x.abs().amax().float() if x.numel() else torch.zeros(())
    if not torch.isfinite(largest):
        raise ValueError("the tensor holds infinity or NaN, which no quantized format can represent")
    return largest


def tensor_scale(amax: torch.Tensor, largest: float = MAX) -> torch.Tensor:
    """Scale of a tensor (`weight_scale_2`, and likewise `input_scale`), float32 []."""
    value, smallest = amax.item(), largest * torch.finfo(torch.float32).tiny
    if not 0 <= value < float("inf") or 0 < value < smallest:
        raise ValueError(
            f"a largest magnitude of {value:g} cannot be scaled: expected 0, or {smallest:.3g} and more"
        )
    # The divisor is a tensor: on some devices torch multiplies by the reciprocal of a Python number.
    return (amax if value else torch.ones_like(amax)) / torch.tensor(largest, device=amax.device)


def block_scales(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Bits of the blocks' E4M3 scales, uint8 [..., n / 16], of x [..., n] and the tensor's scale [].

    x is float32, float16 or bfloat16, and n a multiple of 16.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{x.shape[-1]} columns are not divisible by the NVFP4 block of {BLOCK}")
    largest = x.unflatten(-1, (-1, BLOCK)).abs().amax(-1).float()
    scales = largest / (e2m1.MAX * scale)
    scales[scales == 0] = 1.0
    return e4m3.encode(scales.clamp_(min=e4m3.TINY))


def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes, uint8 [..., n / 2], and `block_scales` of a weight or a band of its rows, finite."""
    bits = block_scales(x, scale)
    steps = e4m3.decode(bits) * scale
    scaled = x.unflatten(-1, (-1, BLOCK)) / steps.unsqueeze(-1)
    return e2m1.pack(e2m1.encode(scaled).flatten(-2)), bits


def dequantize(
    packed: torch.Tensor, bits: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The inverse of `quantize`: [..., n] in `dtype`, rounded once from the FP32 product."""
    if packed.shape[:-1] != bits.shape[:-1] or packed.shape[-1] * 2 != bits.shape[-1] * BLOCK:
        raise ValueError(
            f"block scales {list(bits.shape)} do not fit packed elements {list(packed.shape)}: "
            f"expected one scale for {BLOCK // 2} bytes"
        )
    steps = e4m3.decode(bits) * scale
    values = e2m1.decode(e2m1.unpack(packed)).unflatten(-1, (-1, BLOCK))
    return (values * steps.unsqueeze(-1)).flatten(-2).to(dtype)
