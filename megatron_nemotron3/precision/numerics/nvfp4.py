"""NVFP4 weights for inference engines: E2M1 elements with scales on two levels.

Along the last axis every 16 elements share an E4M3 scale, and the whole tensor has an FP32 scale:

    value = E2M1 code * block scale * tensor scale

Scales come from the largest magnitudes ("max calibration"). They are computed in FP32, in the order of NVIDIA
ModelOpt 0.47 (`NVFP4QTensor`), so that bytes are equal:

    tensor scale = amax / 2688                          2688 = 6 * 448
    block scale  = e4m3(amax of the block / (6 * tensor scale)), from 2^-9 to 448
    code         = e2m1(x / (block scale * tensor scale))

Two searches take the block scale of the least sum of squared errors instead. Four-over-six, as ModelOpt packs
Ultra and Lightning, scales the largest magnitude of a block to 6, or to 4 if that is better:

    tensor scale = amax / 1536                          1536 = 6 * 256; 1.5 * 256 is an E4M3 number, too
    block scale  = e4m3(amax of the block * (1 or 1.5) / 6 * 256 / (amax / 6)), from 2^-9 to 448

The other, its recipe `nvfp4-mse` of Super, keeps amax / 2688 and takes any of E4M3's 126 positive numbers, of
equal ones the smallest. Both round the scales that they compare in another order, four-over-six without a
smallest one. ModelOpt's kernels for CUDA divide approximately: there nearly equal errors may be decided
otherwise. All else runs on a CPU, and gives these bytes, but for tensors up to 3.6e-7 or from 1e19 on, where
its search of all numbers takes the smallest for every block, and this one does not.

Training computes scales differently, see `precision.scales`: TransformerEngine multiplies by reciprocals and
lets block scales underflow.

Corner cases: a block of zeros has scale 1, in four-over-six 1 / tensor scale up to 448, among all numbers the
smallest, as in ModelOpt. A tensor of zeros is scaled as if its amax were 1, where ModelOpt writes NaN. Blocks
below 2^-9 / 448 of the largest (2^-9 / 256) keep the scale 2^-9 and round to zero. Infinity and NaN are
refused, and so is an amax whose tensor scale is not a normal FP32 number.

All functions work row by row: bands of rows with the same tensor scale give the bytes of the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce

import torch

from megatron_nemotron3.precision.numerics import ALL_SCALES, FOUR_OVER_SIX, e2m1, e4m3
from megatron_nemotron3.precision.numerics import NVFP4_BLOCK as BLOCK
from megatron_nemotron3.precision.numerics.grid import E2M1

#: The largest value that a tensor scale of 1 can represent.
MAX = e2m1.MAX * e4m3.MAX
#: The same in four-over-six where 6 is the largest element.
FOUR_OVER_SIX_MAX = e2m1.MAX * 256.0
#: Either by the search for block scales.
LARGEST = {"": MAX, ALL_SCALES: MAX, FOUR_OVER_SIX: FOUR_OVER_SIX_MAX}


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor or of a band of it, float32 []."""
    largest = x.abs().amax().float() if x.numel() else torch.zeros(())
    if not torch.isfinite(largest):
        raise ValueError("the tensor holds infinity or NaN, which no quantized format can represent")
    return largest


def scale_of(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """`tensor_scale` without its check, float32 of the shape of `amax`; NaN stays NaN."""
    # The divisor is a tensor: on some devices torch multiplies by the reciprocal of a Python number.
    return torch.where(amax == 0, 1.0, amax) / torch.full_like(amax, largest)


def tensor_scale(amax: torch.Tensor, largest: float = MAX) -> torch.Tensor:
    """Scale of a tensor (`weight_scale_2`, and likewise `input_scale`), a normal float32 []."""
    value, smallest = amax.item(), largest * torch.finfo(torch.float32).tiny
    if not 0 <= value < float("inf") or 0 < value < smallest:
        raise ValueError(
            f"a largest magnitude of {value:g} cannot be scaled: expected 0, or {smallest:.3g} and more"
        )
    return scale_of(amax, largest)


def block_scales(x: torch.Tensor, amax: torch.Tensor, search: str = "") -> torch.Tensor:
    """Bits of the blocks' E4M3 scales, uint8 [..., n / 16], of x [..., m, n] in a tensor of this amax [].

    x is float32, float16 or bfloat16, amax float32, n a multiple of 16. search: a key of `LARGEST`.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{x.shape[-1]} columns are not divisible by the NVFP4 block of {BLOCK}")
    if search:
        rows = (1 << (18 if x.is_cpu else 26)) * x.shape[-2] // max(1, x.numel())
        return torch.cat([_searched(part, amax, search) for part in x.split(max(1, rows), -2)], -2)
    scales = x.unflatten(-1, (-1, BLOCK)).abs().amax(-1).float() / (e2m1.MAX * scale_of(amax, MAX))
    return e4m3.encode(torch.where(scales == 0, 1.0, scales).clamp_(min=e4m3.TINY))


def _searched(x: torch.Tensor, amax: torch.Tensor, search: str) -> torch.Tensor:
    """`block_scales` of a band of rows by a search."""
    amax = torch.where(amax == 0, 1.0, amax)
    # A power of two changes no bits, and keeps squares within FP32.
    exponent = torch.frexp(amax).exponent.clamp(max=126) * (search == ALL_SCALES)
    unit, six = torch.ldexp(torch.ones_like(amax), -exponent), torch.full_like(amax, e2m1.MAX)
    blocks = (x.float() * unit).unflatten(-1, (-1, BLOCK))
    whole, largest = amax * unit * (MAX / LARGEST[search]) / six, blocks.abs().amax(-1)
    encode = torch.where(whole <= 2.0**-24, 1.0, whole).reciprocal_().mul_(e4m3.MAX)
    if search == ALL_SCALES:
        return _of_least_error(blocks, encode.reciprocal(), _all_scales(e4m3.encode(largest / six * encode)))
    pairs = ((m, e4m3.encode(m / six * encode)) for m in (largest * 1.5, largest))
    scales = _of_least_error(blocks, encode.reciprocal(), pairs).div_(six)
    scales = torch.where(scales == 0, 1.0, scales).mul_(256.0).div_(amax / six)
    return e4m3.encode(scales.clamp_(min=e4m3.TINY))


def _all_scales(around: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bits, twice, that can have the least error, near those by the largest magnitudes."""
    # Half a step has no larger error, unless it cuts the largest element or is no E4M3 number (bits to 15). A
    # quarter of the first cuts it by more than all errors together may be.
    first = max(7, 15 - int(around.min())) if around.is_cpu and around.numel() else 15
    for offset in range(first, -17, -1):
        bits = (around.int() + offset).clamp_(1, 126).to(torch.uint8)
        yield bits, bits


def _of_least_error(
    blocks: torch.Tensor, unit: torch.Tensor, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Of (value, bits of a scale), falling, the values of least squared error, of equal ones the last."""
    largest = blocks.abs().amax(-1)
    least, chosen = torch.full_like(largest, torch.inf), torch.zeros_like(largest, dtype=torch.uint8)
    for value, bits in pairs:
        step = e4m3.decode(bits) * unit
        error = blocks / torch.where(step == 0, 1.0, step).unsqueeze(-1)
        E2M1.round_(error, torch.empty_like(error)).mul_(step.unsqueeze(-1)).sub_(blocks).square_()
        # In the order of torch.sum on a CPU, on any device.
        total = reduce(torch.add, (error[..., :8] + error[..., 8:]).unbind(-1))
        chosen = torch.where(total <= least, value, chosen)
        least = torch.minimum(total, least)
        # Smaller scales cut the largest element by more than this.
        if blocks.is_cpu and bool(((largest - step * e2m1.MAX).clamp_(min=0).square_() > least).all()):
            break
    return chosen


def quantize(x: torch.Tensor, amax: torch.Tensor, search: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes, uint8 [..., n / 2], and `block_scales` of a weight or a band of its rows, finite."""
    bits = block_scales(x, amax, search)
    steps = e4m3.decode(bits) * scale_of(amax, LARGEST[search])
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
