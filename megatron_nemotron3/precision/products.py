"""Quantized operands and their matmuls, as tensor cores compute them. BF16 holds all operands exactly.

NVFP4 operands are multiplied in units (element times block scale), the result once by the tensors' scales.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_nemotron3.precision.formats import NVFP4
from megatron_nemotron3.precision.numerics.nvfp4 import MAX
from megatron_nemotron3.precision.quantizer import Amax, Operand, fake_quantize, units
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.scales import product_scale

#: Megatron's random stream of tensor-parallel ranks.
MODEL_PARALLEL_STREAM = "model-parallel-rng"


def operand(x: Tensor, how: Spec, amax: Amax | None = None) -> Operand:
    """Quantize an operand [..., m, k]; stochastic rounding draws from torch's default generator."""
    # A CPU without BF16 units multiplies FP32 five times as fast as BF16 (benchmarks/nvfp4.py).
    dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    if how.format == NVFP4:
        return units(x, how, amax=amax, dtype=dtype)
    missing = -x.shape[how.axis] % how.block
    if missing:
        x = F.pad(x, (0, missing) if how.axis == -1 else (0, 0, 0, missing))
    return Operand(fake_quantize(x, how, dtype=dtype), None)


def draws(stream: str) -> AbstractContextManager[object]:
    """Context manager: torch's generator continues Megatron's random stream of that name, if there is one."""
    tracker = get_cuda_rng_tracker()
    return tracker.fork(stream) if stream in tracker.get_states() else nullcontext()


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """a.values @ b.values [m, n], accumulated and scaled in FP32, rounded once to `dtype`."""
    result = matmul(a.values, b.values)
    if a.amax is None or b.amax is None:
        return result.to(dtype)
    # One pass scales and rounds.
    out = result if dtype == result.dtype else torch.empty_like(result, dtype=dtype)
    return torch.mul(result, product_scale(a.amax, b.amax), out=out)


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """[m, k] @ [k, n] -> [m, n] in float32, for BF16 operands on a GPU, too."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    result: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return result if out is None else out.copy_(result)


def padded(x: Tensor, block: int) -> Tensor:
    """Pad [t, d] with zero rows to a multiple of `block`."""
    missing = -len(x) % block
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def dequantized(q: Operand) -> Tensor:
    """Values of an operand in float32. NVFP4 has one amax per tensor, matrix, row or block of rows."""
    values = q.values.float()
    if q.amax is None or not values.numel():
        return values
    scale = q.amax * (1 / MAX)
    if scale.ndim == 2:
        scale = scale.repeat_interleave(len(values) // len(scale), 0)
    return values * scale


def gather_rows(x: Tensor, group: Any) -> Tensor:
    """Gather a sequence-parallel tensor over a group: [s / tp, ...] -> [s, ...]."""
    total = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(total, x.contiguous(), group=group)
    return total
