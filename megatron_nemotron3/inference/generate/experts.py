"""The routed experts of a layer: y = sum_i p_i E_i(z) over the chosen ones, computed in three ways:

in place   reads the matrices of the selected experts where they are, row by row: few tokens on a CPU
gathered   copies them into one product, without a host synchronization: few tokens on a GPU
sorted     sorts tokens by expert, as in training; on a GPU with torch's grouped product the numbers of
           tokens stay on the device

Weights of products with few rows are laid out as is fastest: "packed" where oneDNN packs them (two rows cost
little more than one), "rows" [out, in] in 16 bits on a CPU without that, else "transposed" [in, out].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from megatron_nemotron3.layers.functional import weighted_values
from megatron_nemotron3.layers.grouped import grouped_mm, grouped_mm_works, squared_relu_experts

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


#: Elements of gathered matrices up to which a GPU gathers: memory is read three times, with few launches.
GATHERED_ELEMENTS = 2**28
#: A CPU reads matrices in place up to either: mean uses of an expert, or elements of the selected matrices.
#: Measured on one AVX-512 core.
IN_PLACE_USES, IN_PLACE_ELEMENTS = 3, 2**22
#: Rows of matrices that one operation reads in place, at most: each has an index of 8 bytes.
INDEX_ELEMENTS = 2**21


class Experts:
    """The matrices of all experts; `up` [experts, inner, ffn] and `down` [experts, ffn, inner].

    A product is then a weighted sum of rows.
    """

    def __init__(self, up: Tensor, down: Tensor) -> None:
        self.up, self.down = up, down
        self.count, self.inner, self.width = up.shape
        self._rows1, self._rows2 = up.view(-1, self.width), down.view(-1, self.inner)
        self._inputs = torch.arange(self.inner, device=up.device)
        self._outputs = torch.arange(self.width, device=up.device)
        self._grouped = grouped_mm_works(up[0], [up[0]], self.count)
        self.each = [w.t() for w in up.unbind()], [w.t() for w in down.unbind()]

    def __call__(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """z [t, inner], the experts of each token and their weights [t, k] -> [t, inner]."""
        return self._implementation(chosen.shape[0], chosen.shape[1], z.device.type)(z, chosen, weight)

    def _implementation(self, tokens: int, k: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        matrix, pairs = self.inner * self.width, tokens * k
        if device == "cpu":
            # 16-bit products by expert take several times as long where the CPU has no instructions for them.
            slow = self.up.dtype.itemsize == 2 and not packs(self.up.dtype)
            few = slow or pairs <= IN_PLACE_USES * self.count or pairs * matrix <= IN_PLACE_ELEMENTS
            return self._in_place if few else self._sorted
        return self._gathered if pairs * matrix <= GATHERED_ELEMENTS else self._sorted

    def _in_place(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        (t, k), expert = chosen.shape, chosen.view(-1, 1)
        if t > 1 and t * k * max(self.inner, self.width) > INDEX_ELEMENTS:
            halves = zip(*(part.split(-(-t // 2)) for part in (z, chosen, weight)))
            return torch.cat([self._in_place(*half) for half in halves])
        # Both products are sums of weighted rows of the stacked matrices, so no matrix is copied.
        rows = torch.add(self._inputs, expert, alpha=self.inner)
        each = z.unsqueeze(1).expand(t, k, self.inner).reshape(-1)
        hidden = _weighted_sums(self._rows1, rows, each).view(t, k, self.width)
        hidden = hidden.relu_().mul_(hidden).mul_(weight.unsqueeze(-1))
        rows = torch.add(self._outputs, expert, alpha=self.width)
        return _weighted_sums(self._rows2, rows.view(t, -1), hidden.view(-1))

    def _gathered(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        (t, k), index = chosen.shape, chosen.view(-1)
        up = self.up.index_select(0, index)  # [t * k, inner, ffn]
        down = self.down.index_select(0, index).view(t, -1, self.inner)
        each = z.unsqueeze(1).expand(t, k, self.inner).reshape(t * k, 1, -1)
        hidden = torch.bmm(each, up).view(t, k, self.width)
        hidden = hidden.relu_().mul_(hidden).mul_(weight.unsqueeze(-1))
        return torch.bmm(hidden.view(t, 1, -1), down).squeeze(1)

    def _sorted(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        (t, k), expert = chosen.shape, chosen.view(-1)
        order = expert.argsort(stable=True)
        token = order.div(k, rounding_mode="floor")
        rows, weight = z.index_select(0, token), weight.view(-1).index_select(0, order)
        if z.is_cuda and self._grouped:
            y = self._grouped_products(rows, weight, expert)
        else:
            counts = torch.bincount(expert, minlength=self.count).tolist()
            y = squared_relu_experts(rows, weight, *self.each, counts, recompute=True)
        # Restore the order of the tokens, where one reduction sums a token's experts.
        return torch.empty_like(y).index_copy_(0, order, y).view(t, k, -1).sum(1)

    def _grouped_products(self, rows: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        """As `squared_relu_experts` of rows sorted by expert; `expert` [t]: of each, in any order."""
        counts = torch.zeros(self.count, dtype=torch.int32, device=expert.device)
        ends = counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32)).cumsum(0)
        ends = ends.to(torch.int32)
        hidden = grouped_mm(rows, self.up, offs=ends)
        result: Tensor = grouped_mm(weighted_values(hidden, weight), self.down, offs=ends)
        return result


def _weighted_sums(table: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Sums of weighted rows of a table."""
    bags = torch.embedding_bag(table, rows.view(-1), _starts(*rows.shape), False, 0, False, weight)
    result: Tensor = bags[0]
    return result


@lru_cache(maxsize=64)
def _starts(sums: int, r: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(0, sums * r, r)
