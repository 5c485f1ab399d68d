"""Quantized storage: codes, block scales and the tensor's amax, as TransformerEngine lays them out.

The slow and plain form of what `quantizer` does in a few passes: its values are these, decoded (a test holds
the two together). A byte of NVFP4 codes holds two neighbors along the axis of the blocks, the even one low.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_nemotron3.precision import mxfp8, nvfp4
from megatron_nemotron3.precision.numerics import e2m1, e4m3
from megatron_nemotron3.precision.quantizer import Amax, prepare
from megatron_nemotron3.precision.spec import Spec


@dataclass(frozen=True)
class Packed:
    """A quantized [..., m, k]. With n = k for axis -1; for axis -2 everything is transposed:
    m and n swap.

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
            steps = nvfp4.steps(e4m3.decode(self.scales), self.amax)
        blocks = values.unflatten(-1, (-1, self.spec.block)) * steps.unsqueeze(-1)
        result = blocks.flatten(-2).to(dtype)
        return result.mT.contiguous() if self.spec.axis == -2 else result


@torch.no_grad()
def quantize(
    x: torch.Tensor, spec: Spec, generator: torch.Generator | None = None, amax: Amax | None = None
) -> Packed:
    """Quantize and pack. Arguments and errors as `quantizer.fake_quantize`; values too, for equal generators.

    Codes follow the sign of x * scale: a negative number that rounds to zero has the code of -0.
    """
    prepared = prepare(x, spec, amax)
    elements, block_amax, whole = prepared.x.float(), prepared.block_amax, prepared.amax
    if whole is None:
        encode, _ = mxfp8.scales(block_amax)
        bits = mxfp8.exponents(block_amax).to(torch.uint8)
    else:
        encode, block = nvfp4.scales(block_amax, whole)
        bits = e4m3.encode(block)
    for axis in (-1, -2) if spec.tile else (spec.axis,):
        encode = encode.repeat_interleave(spec.block, axis)
    if spec.tile:
        bits = bits.repeat_interleave(spec.block, -1 if spec.axis == -2 else -2)
    scaled = elements * encode
    if spec.stochastic:
        scratch = torch.empty_like(scaled)
        nvfp4.GRID.round_stochastic_(scaled, scratch, torch.empty_like(scaled), generator)
    if spec.axis == -2:
        scaled, bits = scaled.mT, bits.mT.contiguous()
        if whole is not None and whole.ndim > 1:
            whole = whole.mT
    if whole is None:
        return Packed(e4m3.encode(scaled).contiguous(), bits, None, spec)
    return Packed(e2m1.pack(e2m1.encode(scaled)).contiguous(), bits, whole, spec)
