"""The plain reference of `precision.quantizer`: codes, scales and amax, laid out as TransformerEngine's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_nemotron3.precision.numerics import FOUR_OVER_SIX, e2m1, e4m3
from megatron_nemotron3.precision.numerics.grid import E2M1, draw
from megatron_nemotron3.precision.numerics.nvfp4 import LARGEST
from megatron_nemotron3.precision.quantizer import Amax, _block_scales, prepare
from megatron_nemotron3.precision.recipe import MatmulRecipe, Spec, recipe
from megatron_nemotron3.precision.scales import mxfp8_exponents, mxfp8_scales, nvfp4_steps
from megatron_nemotron3.precision.settings import Emulation

#: The published recipe of NVFP4.
PUBLISHED: MatmulRecipe = recipe("nvfp4", Emulation())


@dataclass(frozen=True)
class PackedOperand:
    """A quantized tensor [..., m, k] as bytes. n = k; for axis -2 all is transposed, so m and n swap.

    A byte of NVFP4 codes holds two neighbors along the axis of the blocks, the even one in the low half.

    codes: uint8 [..., m, n / 2] (NVFP4, two in a byte) or [..., m, n] (MXFP8, bits of E4M3).
    scales: uint8 [..., m, n / block], bits of E4M3 (NVFP4; a tile's scale is repeated in its 16 rows) or of
        E8M0 (MXFP8).
    amax: float32, [] or broadcasting to the scales; None in MXFP8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    spec: Spec

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[..., m, k] in `dtype`, rounded once from FP32; still rotated if `spec.hadamard`."""
        if self.amax is None:
            values = e4m3.decode(self.codes)
            steps = (self.scales.to(torch.int32) << 23).view(torch.float32)
        else:
            values = e2m1.decode(e2m1.unpack(self.codes))
            largest = LARGEST[FOUR_OVER_SIX if self.spec.four_over_six else ""]
            steps = nvfp4_steps(e4m3.decode(self.scales), self.amax, largest)
        blocks = values.unflatten(-1, (-1, self.spec.block)) * steps.unsqueeze(-1)
        result = blocks.flatten(-2).to(dtype)
        return result.mT.contiguous() if self.spec.axis == -2 else result


@torch.no_grad()
def quantize(
    x: torch.Tensor, spec: Spec, generator: torch.Generator | None = None, amax: Amax | None = None
) -> PackedOperand:
    """Quantize and pack. Arguments and errors as `fake_quantize`, and the same values for equal generators.

    Codes keep the sign of x * scale: a negative number that rounds to zero has the code of -0.
    """
    prepared = prepare(x, spec, amax)
    elements, block_amax, whole = prepared.x.float(), prepared.block_amax, prepared.amax
    if whole is None:
        encode, _ = mxfp8_scales(block_amax)
        bits = mxfp8_exponents(block_amax).to(torch.uint8)
    else:
        encode, block = _block_scales(prepared.x, spec, block_amax, whole)
        bits = e4m3.encode(block)
    for axis in (-1, -2) if spec.tile else (spec.axis,):
        encode = encode.repeat_interleave(spec.block, axis)
    if spec.tile:
        bits = bits.repeat_interleave(spec.block, -1 if spec.axis == -2 else -2)
    scaled = elements * encode
    if spec.stochastic:
        scratch = torch.empty_like(scaled)
        drawn = draw(scratch.view(-1)[: scaled.numel() // 2], generator)
        E2M1.round_stochastic_(scaled, scratch, torch.empty_like(scaled), drawn)
    if spec.axis == -2:
        scaled, bits = scaled.mT, bits.mT.contiguous()
        if whole is not None and whole.ndim > 1:
            whole = whole.mT
    if whole is None:
        return PackedOperand(e4m3.encode(scaled).contiguous(), bits, None, spec)
    return PackedOperand(e2m1.pack(e2m1.encode(scaled)).contiguous(), bits, whole, spec)
