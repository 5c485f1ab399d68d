"""NVFP4 weights for inference engines: E2M1 elements with scales on two levels.

Along the last axis every 16 elements share an E4M3 scale, and the whole tensor has an FP32 scale:

    value = E2M1 code * block scale * tensor scale

Scales come from the largest magnitudes ("max calibration"). They are computed in FP32, in the order of NVIDIA
ModelOpt 0.47 (`NVFP4QTensor`), so that bytes are equal:

    tensor scale = amax / 2688                          2688 = 6 * 448
    block scale  = e4m3(amax of the block / (6 * tensor scale)), from 2^-9 to 448
    code         = e2m1(x / (block scale * tensor scale))

Four-over-six, as ModelOpt packs Ultra and Lightning, scales the largest magnitude of a block to 6, or to 4 if
that makes the sum of squared errors smaller:

    tensor scale = amax / 1536                          1536 = 6 * 256; 1.5 * 256 is an E4M3 number, too
    block scale  = e4m3(amax of the block * (1 or 1.5) / 6 * 256 / (amax / 6)), from 2^-9 to 448

ModelOpt's search rounds the scales that it compares in another order, without a smallest one. Its kernel for
that is for CUDA alone and divides approximately: there nearly equal errors may be decided otherwise. All else
runs on a CPU, and gives these bytes.

Training computes scales differently, see `precision.scales`: TransformerEngine multiplies by reciprocals and
lets block scales underflow.

Corner cases: a block of zeros has scale 1, in four-over-six 1 / tensor scale up to 448, as in ModelOpt. A
tensor of zeros is scaled as if its amax were 1, where ModelOpt writes NaN. Blocks below 2^-9 / 448 of the
largest (2^-9 / 256) keep the scale 2^-9 and round to zero.
Infinity and NaN are refused, and so is an amax whose tensor scale is not a normal FP32 number.

All functions work row by row: bands of rows with the same tensor scale give the bytes of the whole weight.
"""

from __future__ import annotations

from functools import reduce

import torch

from megatron_nemotron3.precision.numerics import NVFP4_BLOCK as BLOCK
from megatron_nemotron3.precision.numerics import e2m1, e4m3
from megatron_nemotron3.precision.numerics.grid import E2M1

#: The largest value that a tensor scale of 1 can represent.
MAX = e2m1.MAX * e4m3.MAX
#: The same in four-over-six where 6 is the largest element.
FOUR_OVER_SIX_MAX = e2m1.MAX * 256.0


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor or of a band of it, float32 []."""
    largest = x.abs().amax().float() if x.numel() else torch.zeros(())
    if not torch.isfinite(largest):
        raise ValueError("the tensor holds infinity or NaN, which no quantized format can represent")
    return largest


def limit(four_over_six: bool) -> float:
    """`MAX`, or in four-over-six `FOUR_OVER_SIX_MAX`."""
    return FOUR_OVER_SIX_MAX if four_over_six else MAX


def tensor_scale(amax: torch.Tensor, largest: float = MAX) -> torch.Tensor:
    """Scale of a tensor (`weight_scale_2`, and likewise `input_scale`), a normal float32 []."""
    value, smallest = amax.item(), largest * torch.finfo(torch.float32).tiny
    if not 0 <= value < float("inf") or 0 < value < smallest:
        raise ValueError(
            f"a largest magnitude of {value:g} cannot be scaled: expected 0, or {smallest:.3g} and more"
        )
    # The divisor is a tensor: on some devices torch multiplies by the reciprocal of a Python number.
    return (amax if value else torch.ones_like(amax)) / torch.tensor(largest, device=amax.device)


def block_scales(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Bits of the blocks' E4M3 scales, uint8 [..., n / 16], of x [..., n] and the tensor's scale [].

    x is float32, float16 or bfloat16, n a multiple of 16. amax: of the tensor, float32 [], in four-over-six.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{x.shape[-1]} columns are not divisible by the NVFP4 block of {BLOCK}")
    blocks = x.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).float()
    if amax is None:
        scales = scales / (e2m1.MAX * scale)
        scales[scales == 0] = 1.0
    else:
        amax, six = torch.where(amax == 0, 1.0, amax), scales.new_tensor(e2m1.MAX)
        scales = _of_smaller_error(blocks, scales, amax).div_(six)
        scales[scales == 0] = 1.0
        scales = scales.mul_(256.0).div_(amax / six)
    return e4m3.encode(scales.clamp_(min=e4m3.TINY))


def _of_smaller_error(blocks: torch.Tensor, largest: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The largest magnitudes of blocks [..., 16], times 1.5 where four-over-six takes 4."""
    six = torch.full_like(amax, e2m1.MAX)
    limit = amax * (e4m3.MAX / 256.0) / six
    encode = torch.where(limit <= 2.0**-24, 1.0, limit).reciprocal_().mul_(e4m3.MAX)
    errors = []
    for factor in (1.0, 1.5):
        bits = e4m3.encode((largest * factor).div_(six).mul_(encode))
        steps = (e4m3.decode(bits) * encode.reciprocal()).unsqueeze(-1)
        error = blocks / torch.where(steps == 0, 1.0, steps)
        E2M1.round_(error, torch.empty_like(error)).mul_(steps).sub_(blocks).square_()
        # In the order of torch.sum on a CPU, on any device.
        errors.append(reduce(torch.add, (error[..., :8] + error[..., 8:]).unbind(-1)))
    return torch.where(errors[1] < errors[0], largest * 1.5, largest)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes, uint8 [..., n / 2], and `block_scales` of a weight or a band of its rows, finite."""
    bits = block_scales(x, scale, amax)
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
