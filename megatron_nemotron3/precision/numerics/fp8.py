"""FP8 weights for inference engines: E4M3 elements with an FP32 scale (`nvfp4.tensor_scale`, amax / 448).

Each element is divided in FP32 and rounded once. ModelOpt divides a BF16 weight in BF16 and so rounds twice:
its elements differ by one step where the BF16 quotient is a tie, and are then farther from the weight.
"""

from __future__ import annotations

import torch

from megatron_nemotron3.precision.numerics import e4m3


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 bits of `x / scale`, uint8 of the shape of `x`; `scale` is float32 and broadcasts."""
    return e4m3.encode(x.float() / scale)


def dequantize(bits: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values of E4M3 bits times their scale, in `dtype`, rounded once from the FP32 product."""
    return (e4m3.decode(bits) * scale).to(dtype)
