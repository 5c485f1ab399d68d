"""Matrix products with few rows, in the weight layout that is fastest on the device.

packed       a CPU for which oneDNN packs weights: two rows cost little more than one
rows         [out, in], a 16-bit weight on a CPU that does not pack it
transposed   [in, out], everything else
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

#: Elements from which an FP32 weight is packed. A call of oneDNN takes 10 microseconds more than one of MKL.
PACKED_ELEMENTS = 2**18
#: Rows that the packed layout is made for. It then serves any number; one for few rows is slower with many.
ROWS_HINT = 512


class DecodeLinear:
    """y = x W^T of a weight [out, in] in one of the layouts above."""

    def __init__(self, weight: Tensor) -> None:
        self.dtype = weight.dtype
        self.packed: Tensor | None = None
        small = weight.dtype == torch.float32 and weight.numel() < PACKED_ELEMENTS
        if weight.device.type == "cpu" and not small and packs(weight.dtype):
            self.layout, self.packed = "packed", _pack(weight)
        elif weight.device.type == "cpu" and weight.dtype.itemsize == 2:
            # Without 16-bit instructions a product with [in, out] takes 4 to 40 times as long.
            self.layout, self.matrix = "rows", weight.contiguous().t()
        else:
            # A product with one row is twice as fast on a CPU as with [out, in].
            self.layout, self.matrix = "transposed", weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        return torch.mm(x, self.matrix) if self.packed is None else _packed_product(x, self.packed)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether this CPU and this torch multiply by packed weights of a type; one product is tried.

    Only with AVX-512: without it oneDNN calls a general product for FP32, which gains nothing.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    weight = (torch.arange(32 * 48).view(48, 32) % 7 - 3).to(dtype)
    x = (torch.arange(2 * 32).view(2, 32) % 5 - 2).to(dtype)  # whole numbers: the product is exact
    try:
        return torch.equal(_packed_product(x, _pack(weight)), (x.float() @ weight.float().t()).to(dtype))
    except (AttributeError, RuntimeError):
        return False


def _pack(weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    return result


def _packed_product(x: Tensor, packed: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    return result
