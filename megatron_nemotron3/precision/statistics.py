"""What quantization does to a tensor, in numbers: definitions of every column of a precision report.

x is an operand of a matmul as the quantizer receives it (gathered over sequence-parallel ranks; rotated in
wgrad, where the recipe rotates), and q are the values that the matmul computes with:

    zeros     share of elements of x that are exactly 0
    flushed   flush-to-zero share: elements with x != 0 and q = 0, over elements with x != 0
    sqnr_db   signal to quantization noise, 10 log10(sum x^2 / sum (x - q)^2), in dB
    amax      max |x|

A weight gradient has zeros and amax, as the optimizer sees it (summed over microbatches, reduced over ranks,
clipped). Shares are of one step, from 0 to 1. Sums are stored, because those of microbatches, ranks and
experts can be added. UNKNOWN: whether the flush-to-zero of NVIDIA's reports divides by all elements, and how
Super's "7 % of the parameters had zero weight gradients" was counted (arXiv 2604.12374, section 2.2).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_nemotron3.common.hooks import MeasuredSteps
from megatron_nemotron3.precision import blocks as cut
from megatron_nemotron3.precision.products import dequantized
from megatron_nemotron3.precision.quantizer import Operand
from megatron_nemotron3.precision.recipe import MatmulRecipe, Spec
from megatron_nemotron3.precision.report import GRADIENT
from megatron_nemotron3.precision.scales import rotate

#: Columns of `Sums.sums`.
ELEMENTS, ZEROS, FLUSHED, SIGNAL, NOISE = range(5)


class Sums(NamedTuple):
    """sums: float64 [G, 5], the columns above for G groups (experts, or 1). amax: float64 [G]."""

    sums: Tensor
    amax: Tensor

    @classmethod
    def zero(cls, groups: int, device: torch.device) -> Sums:
        return cls(*(torch.zeros(groups, *more, dtype=torch.float64, device=device) for more in ((5,), ())))

    def add(self, other: Sums, first: int = 0) -> None:
        """Add other sums in place; their group 0 is group `first` here."""
        here = slice(first, first + len(other.sums))
        self.sums[here] += other.sums
        self.amax[here] = torch.maximum(self.amax[here], other.amax)


class Numbers(NamedTuple):
    """Columns of a report for one tensor; NaN where the divisor is 0."""

    elements: int
    zeros: float
    flushed: float
    sqnr_db: float
    amax: float


@torch.no_grad()
def measure(
    x: Tensor,
    how: Spec,
    q: Tensor,
    *,
    owner: Tensor | None = None,
    groups: int = 1,
    filler: Tensor | None = None,
) -> Sums:
    """Compute the sums of an operand.

    Args:
        x: [..., k], as the quantizer receives it; rotated here if the operand is.
        q: dequantized values that the matmul uses, still rotated; zeros at the end may fill the last blocks.
        owner: group of each row of x (int64), of G `groups`; None: all rows belong to group 0.
        filler: [G], number of padding rows of zeros in each group. They are not counted, except in a rotated
            operand, where they are zeros no longer.
    """
    if how.hadamard:
        x = rotated(x, how)
    q = q[tuple(slice(size) for size in x.shape)]
    x, q = x.reshape(-1, x.shape[-1]), q.reshape(-1, x.shape[-1])
    rows, width = x.shape
    columns = (
        torch.full((rows,), width, dtype=torch.float64, device=x.device),
        (x == 0).sum(-1).double(),
        ((x != 0) & (q == 0)).sum(-1).double(),
        _row_squares(x),
        _row_squares(x.float() - q.float()),
    )
    if owner is None:
        owner = torch.zeros(rows, dtype=torch.int64, device=x.device)
    result = Sums.zero(groups, x.device)
    result.sums.index_add_(0, owner, torch.stack(columns, dim=-1))
    result.amax.scatter_reduce_(0, owner, x.abs().amax(-1).double(), "amax")
    if filler is not None and not how.hadamard:
        result.sums[:, : ZEROS + 1] -= (filler * width).double().unsqueeze(1)
    return result


def _row_squares(x: Tensor) -> Tensor:
    """Sums of squares of rows, [n, k] -> [n]; in FP64, because squares of gradients underflow in FP32."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square()


def rotated(x: Tensor, how: Spec) -> Tensor:
    """x with its blocks rotated, in its dtype, which is what the quantizer rounds."""
    blocks = cut.view(x.contiguous(), how).float()
    return rotate(blocks, torch.empty_like(blocks)).to(x.dtype).view(x.shape) if x.numel() else x


def numbers(sums: Sequence[float], amax: float) -> Numbers:
    """The columns of a report from sums."""
    elements, zeros, flushed, signal, noise = sums
    not_zero = elements - zeros
    sqnr = math.inf if signal > 0 and noise == 0 else math.nan
    if signal > 0 and noise > 0:
        sqnr = 10 * math.log10(signal / noise)
    return Numbers(
        round(elements),
        zeros / elements if elements else math.nan,
        flushed / not_zero if not_zero else math.nan,
        sqnr,
        amax,
    )


class LinearSums:
    """Sums of one linear's operands in this step. `layer` and `module` are its place in the report."""

    def __init__(
        self,
        switch: MeasuredSteps,
        linear: torch.nn.Module,
        layer: str,
        module: str,
        fmt: str,
        how: MatmulRecipe,
    ) -> None:
        self.layer, self.module, self.format = layer, module, fmt
        self.tensors = (*_recorded_tensors(how), GRADIENT)
        self.linear = weakref.ref(linear)
        #: Experts of this rank, of all ranks (or 1), and the number of this rank's first one.
        self.local: int = getattr(linear, "num_gemms", 1)
        group = getattr(linear, "ep_group", None)
        self.groups = self.local * (group.size() if group is not None else 1)
        self.first = self.local * (group.rank() if group is not None else 0)
        self._switch = switch
        self._sums: dict[str, Sums] = {}

    def watching(self, module: torch.nn.Module) -> bool:
        """Whether this step is measured; never in evaluation."""
        return self._switch.on and module.training

    def add(
        self,
        tensor: str,
        x: Tensor | Sequence[Tensor],
        how: Spec,
        made: Operand | Tensor,
        owner: Tensor | None = None,
        filler: Tensor | int = 0,
    ) -> None:
        """Add an operand, a weight once a step; as `measure`, with this rank's experts as groups.

        x may also be a matrix per expert, without `owner`. filler: of each group, or of the only one.
        """
        if tensor.endswith("weight") and self.has(tensor):
            return
        x = x if isinstance(x, Tensor) else torch.stack([w.detach() for w in x])
        if owner is None and x.ndim == 3:
            owner = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1])
        if isinstance(filler, int):  # the device writes it itself
            filler = torch.full((1,), filler, device=x.device)
        q = dequantized(made) if isinstance(made, Operand) else made
        found = measure(x, how, q, owner=owner, groups=self.local, filler=filler)
        self.of(tensor, x.device).add(found, self.first)

    def of(self, tensor: str, device: torch.device) -> Sums:
        if tensor not in self._sums:
            self._sums[tensor] = Sums.zero(self.groups, device)
        return self._sums[tensor]

    def has(self, tensor: str) -> bool:
        """Whether a tensor was added in this step; a weight is the same in all of its microbatches."""
        return tensor in self._sums

    def clear(self) -> None:
        self._sums = {}


def _recorded_tensors(how: MatmulRecipe) -> tuple[str, ...]:
    """Names of a recipe's operands; the weight of dgrad only if it differs from that of fprop."""
    names = []
    if how.fprop:
        names += ["fprop.x", "fprop.weight"]
    if how.dgrad:
        names += ["dgrad.dy"] if how.shares_weight else ["dgrad.dy", "dgrad.weight"]
    if how.wgrad:
        names += ["wgrad.dy", "wgrad.x"]
    return tuple(names)
