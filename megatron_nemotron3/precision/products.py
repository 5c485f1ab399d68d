"""How a linear's three products are quantized, by format and switches; and the products themselves.

    fprop   Y  = Q(X) Q(W)^T            dgrad   dX = Q(dY) Q(W)            wgrad   dW = Q(dY)^T Q(X)

NVFP4 operands are multiplied in units (element times block scale, exact in BF16) and the product once by the
scales of the two tensors, as tensor cores do. MXFP8 operands are multiplied as they are, exact in BF16, too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.precision import nvfp4, spec
from megatron_nemotron3.precision.quantizer import Amax, fake_quantize, units
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.precision.spec import Spec
from megatron_nemotron3.precision.table import BF16, MXFP8, NVFP4


@dataclass(frozen=True)
class Recipe:
    """The two operands of each product, the gradient or x first; None: the product is not quantized."""

    fprop: tuple[Spec, Spec] | None  # x, weight
    dgrad: tuple[Spec, Spec] | None  # dy, weight
    wgrad: tuple[Spec, Spec] | None  # dy, x

    @property
    def shares_weight(self) -> bool:
        """Whether dgrad takes the weight that fprop quantized."""
        return bool(self.fprop and self.dgrad and self.fprop[1] == self.dgrad[1])

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return next(pair[0].block for pair in (self.fprop, self.dgrad, self.wgrad) if pair)

    @property
    def token_block(self) -> int:
        """Rows that wgrad's operands are filled up to a multiple of; 1: wgrad is not quantized."""
        return self.wgrad[0].block if self.wgrad else 1


@functools.lru_cache
def recipe(fmt: str, chosen: Emulation) -> Recipe | None:
    """The recipe of a format ("nvfp4", "mxfp8" or "bf16"); None: nothing to quantize.

    MXFP8 knows neither rotation nor stochastic rounding nor tiles, so dgrad has a weight of its own, with
    blocks along its rows. Switches of single products hold for both formats.

    Raises:
        ValueError: another format, of which there is no emulation.
    """
    if fmt == BF16:
        return None
    if fmt == NVFP4:
        o = spec.NVFP4
        assert o.x and o.weight and o.dgrad_dy and o.wgrad_dy and o.wgrad_x
        weight = replace(o.weight, tile=chosen.tile)
        result = Recipe(
            (o.x, weight),
            (
                replace(o.dgrad_dy, stochastic=chosen.stochastic),
                weight if chosen.tile else replace(weight, axis=-2),
            ),
            (
                replace(o.wgrad_dy, hadamard=chosen.hadamard, stochastic=chosen.stochastic),
                replace(o.wgrad_x, hadamard=chosen.hadamard),
            ),
        )
    elif fmt == MXFP8:
        row, column = Spec(MXFP8), Spec(MXFP8, axis=-2)
        result = Recipe((row, row), (row, column), (column, column))
    else:
        raise ValueError(f"format {fmt!r} is not emulated: use {NVFP4}, {MXFP8} or {BF16}")
    off = {name: None for name in ("fprop", "dgrad", "wgrad") if not getattr(chosen, name)}
    return None if len(off) == 3 else replace(result, **off)


class Operand(NamedTuple):
    """One side of a product. amax: of NVFP4 values in units; None: values mean themselves."""

    values: Tensor
    amax: Tensor | None

    def t(self) -> Operand:
        """Transposed; the scale of a tensor stays."""
        return Operand(self.values.t(), self.amax)


def operand(x: Tensor, how: Spec, amax: Amax | None = None) -> Operand:
    """Quantize one side of a product; stochastic rounding draws from torch's own generator.

    Args:
        x: [..., m, k].
        amax: of an NVFP4 operand, if it is not that of x (`quantizer.Amax`).
    """
    # A CPU without BF16 units multiplies FP32 five times as fast as BF16 (benchmarks/nvfp4.py).
    dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    if how.format == NVFP4:
        return Operand(*units(x, how, amax=amax, dtype=dtype))
    return Operand(fake_quantize(x, how, dtype=dtype), None)


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """a.values @ b.values [m, n], accumulated and scaled in FP32, rounded once to `dtype`."""
    result = matmul(a.values, b.values)
    if a.amax is None or b.amax is None:
        return result.to(dtype)
    # Scaled and rounded in one pass.
    out = result if dtype == result.dtype else torch.empty_like(result, dtype=dtype)
    return torch.mul(result, nvfp4.product_scale(a.amax, b.amax), out=out)


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """[m, k] @ [k, n] -> [m, n] float32, also of BF16 operands on a GPU."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    result: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return result if out is None else out.copy_(result)


def padded(x: Tensor, block: int) -> Tensor:
    """[t, d] with zero rows behind it, up to a multiple of `block`."""
    missing = -len(x) % block
    return F.pad(x, (0, 0, 0, missing)) if missing else x
