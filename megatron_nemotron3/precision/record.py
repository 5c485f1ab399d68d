"""What a measured step showed of one linear: sums over its operands, by the names of a report.

Whoever multiplies for the linear (`linear.Emulated`, `shadow.Observed`) hands over what it quantized.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from megatron_nemotron3.precision import report, statistics
from megatron_nemotron3.precision.products import Recipe
from megatron_nemotron3.precision.spec import Spec
from megatron_nemotron3.precision.statistics import Sums


class Switch(Protocol):
    """Says whether this step is measured."""

    on: bool


class Record:
    """What was seen of one linear in this step.

    layer, module: its place, for the report.
    tensors: names of the operands its recipe quantizes, and of the weight gradient.
    groups: experts of all ranks, or 1; `first`: number of this rank's first, `local` how many it has.
    """

    def __init__(
        self, switch: Switch, linear: torch.nn.Module, layer: str, module: str, fmt: str, how: Recipe
    ) -> None:
        self.layer, self.module, self.format = layer, module, fmt
        self.tensors = (*_tensors(how), report.GRADIENT)
        self.linear = weakref.ref(linear)
        self.local: int = getattr(linear, "num_gemms", 1)
        group = getattr(linear, "ep_group", None)
        self.groups = self.local * (group.size() if group is not None else 1)
        self.first = self.local * (group.rank() if group is not None else 0)
        self._switch = switch
        self._sums: dict[str, Sums] = {}

    def watching(self, module: torch.nn.Module) -> bool:
        """Whether this step is measured; evaluation is not."""
        return self._switch.on and module.training

    def add(
        self,
        tensor: str,
        x: Tensor,
        how: Spec,
        q: Tensor,
        owner: Tensor | None = None,
        filler: Tensor | None = None,
    ) -> None:
        """Take in an operand; arguments as `statistics.measure`, groups being this rank's experts."""
        found = statistics.measure(x, how, q, owner=owner, groups=self.local, filler=filler)
        self.of(tensor, x.device).add(found, self.first)

    def of(self, tensor: str, device: torch.device) -> Sums:
        """The sums of a tensor in this step."""
        if tensor not in self._sums:
            self._sums[tensor] = Sums.zero(self.groups, device)
        return self._sums[tensor]

    def has(self, tensor: str) -> bool:
        """Whether it was seen in this step: a weight is the same in all of its microbatches."""
        return tensor in self._sums

    def clear(self) -> None:
        """Forget the step."""
        self._sums = {}


def _tensors(how: Recipe) -> tuple[str, ...]:
    """Operands of a recipe; the weight of dgrad only if it is not that of fprop."""
    names = []
    if how.fprop:
        names += ["fprop.x", "fprop.weight"]
    if how.dgrad:
        names += ["dgrad.dy"] if how.shares_weight else ["dgrad.dy", "dgrad.weight"]
    if how.wgrad:
        names += ["wgrad.dy", "wgrad.x"]
    return tuple(names)
