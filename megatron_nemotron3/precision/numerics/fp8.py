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


def squared_errors(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Sums of squared errors of a part of a weight with the scales of `amax` and 1.5 amax, float64 [2].

    ModelOpt adds them up in FP32 when it searches scales: sums that are equal there can differ here.
    """
    x, largest = x.float(), amax * amax.new_tensor([1.0, 1.5])
    scales = e4m3.MAX / torch.where(largest <= 2.0**-24, 1.0, largest)
    values = (e4m3.decode(e4m3.encode(x * scale)) * scale.reciprocal() for scale in scales.unbind())
    return torch.stack([value.sub_(x).square_().sum(dtype=torch.float64) for value in values])


def of_smaller_error(amax: torch.Tensor, errors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`amax`, or 1.5 amax in the `dtype` of the weight if its error [2, ...] is smaller, float32."""
    return torch.where(errors[1] < errors[0], (amax * 1.5).to(dtype).float(), amax)
