"""A trainer's weights as its servers store them: packed when they are sent, to the bits of the packed whole.

Scales follow from largest magnitudes, of a whole weight or of each block of it. Every rank finds those of its
shares, the ranks agree on the largest, and then each packs its own shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.quantized import Weight
from megatron_nemotron3.inference.refit.plan import RefitPlan
from megatron_nemotron3.inference.refit.planner import tensors
from megatron_nemotron3.inference.refit.shares import BLOCK, Stored, axis_of, grid_of, stored_of
from megatron_nemotron3.precision.numerics import e4m3, fp8, nvfp4

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


class PackedSource(Mapping[str, Tensor]):
    """What a training rank sends, by the names of the plan. A tensor is packed each time it is looked up.

    Call `measure`, reduce `largest` to the maximum over all ranks, call `search`, reduce `errors` to the sum,
    then call `compute_scales`.
    source: weights by Hugging Face's names; empty on a rank that only receives.
    """

    def __init__(
        self, plan: RefitPlan, rank: int, source: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._plan, self._rank, self._source = plan, rank, source
        self._rows = {held.weight: held for held in tensors(plan.training, plan.serving)}
        self._made: dict[str, tuple[Weight, Stored]] = {}
        self._places: dict[str, tuple[int, tuple[int, int]]] = {}
        limits: list[Tensor] = []
        size, self._searched = 0, list[str]()
        for name, weight in plan.serving.packed.items():
            if weight.algorithm is not None:
                grid = grid_of(weight)
                self._places[name] = size, grid
                self._searched += [name] * bool(weight.search and weight.algorithm == "FP8")
                size += prod(grid)
                limit = nvfp4.LARGEST[weight.search] if "NVFP4" in weight.algorithm else e4m3.MAX
                limits.append(torch.full((prod(grid),), limit, dtype=torch.float32))
            if name in source:
                self._made |= {stored.name(name): (weight, stored) for stored in stored_of(weight)}
        #: Largest magnitudes, float32 [number of scales].
        self.largest = torch.zeros(size, dtype=torch.float32, device=device)
        self._limits = torch.cat([self.largest[:0].cpu(), *limits]).to(device)
        #: Of the weights whose scale is chosen by error: the errors of both scales, float64 [2, number].
        self.errors = torch.zeros(2, len(self._searched), dtype=torch.float64, device=device)

    def measure(self) -> str | None:
        """Find the largest magnitudes of this rank's shares. Returns what cannot be packed, if anything."""
        for name, (start, grid) in self._places.items():
            if name not in self._source:
                continue
            x = self._weight(name)
            rows, columns = self._numbers(name, x)
            x = x[rows >= 0][:, columns >= 0].abs().float()
            if grid == (1, 1):
                found = x.amax() if x.numel() else x.new_zeros(())
            else:
                rows, columns = (n[n >= 0] // BLOCK for n in (rows, columns))
                by_row = x.new_zeros(grid[0], x.shape[1])
                by_row.scatter_reduce_(0, rows[:, None].expand_as(x), x, "amax")
                found = x.new_zeros(grid)
                found.scatter_reduce_(1, columns.expand_as(by_row), by_row, "amax")
            self.largest[start : start + prod(grid)] = found.flatten()
        return self._first(~torch.isfinite(self.largest), "holds infinity or NaN")

    def search(self) -> None:
        """Find the errors of this rank's shares with the scales to choose from."""
        for number, name in enumerate(self._searched):
            if name in self._source:
                x, largest = self._weight(name), self.largest[self._places[name][0]]
                rows, columns = self._numbers(name, x)
                self.errors[:, number] = fp8.squared_errors(x[rows >= 0][:, columns >= 0], largest)

    def compute_scales(self) -> str | None:
        """Make the scales of the magnitudes that all ranks agreed on. Returns what cannot be packed."""
        places, dtype = [self._places[n][0] for n in self._searched], getattr(torch, self._plan.serving.dtype)
        self.largest[places] = fp8.of_smaller_error(self.largest[places], self.errors, dtype)
        largest, least = self.largest, self._limits * torch.finfo(torch.float32).tiny
        self._scales = torch.where(largest == 0, 1.0, largest) / self._limits
        return self._first((largest > 0) & (largest < least), "is too small for a scale")

    def _first(self, bad: Tensor, what: str) -> str | None:
        place = int(bad.nonzero()[0]) if bool(bad.any()) else None
        names = (n for n, (start, grid) in self._places.items() if place in range(start, start + prod(grid)))
        return None if place is None else f"{next(names)} {what}: it cannot be packed"

    def _weight(self, name: str) -> Tensor:
        """A weight of this rank in the type that the unpacked checkpoint would have."""
        return self._source[name].detach().to(getattr(torch, self._plan.serving.dtype))

    def _numbers(self, name: str, x: Tensor) -> list[Tensor]:
        """The number in the weight of each row and of each column of a shard; -1: it is no part of it."""
        held = self._rows[_EXPERT.sub("{e}", name)]
        every = held.training_shares()
        numbers = [torch.arange(n, device=x.device) for n in x.shape]
        own = numbers[axis_of(held.row)]
        own.fill_(-1)
        for share in every[self._rank % len(every)]:
            place = slice(share.at, share.at + share.stop - share.start)
            own[place] = torch.arange(share.start, share.stop, device=x.device)
        return numbers

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            return self._source[name]
        weight, stored = self._made[name]
        if weight.algorithm is None and stored.suffix == "weight":
            return self._source[weight.tensor.name]
        if stored.suffix in weight.given:
            return self.largest.new_tensor(weight.given[stored.suffix])
        start, grid = self._places[weight.tensor.name]
        scale = self._scales[start : start + prod(grid)]
        if not stored.columns:
            return scale.view(stored.shape)
        x = self._weight(weight.tensor.name)
        if "NVFP4" in str(weight.algorithm):
            if stored.suffix == "weight":
                return nvfp4.quantize(x, self.largest[start], weight.search)[0]
            return nvfp4.block_scales(x, self.largest[start], weight.search).view(torch.float8_e4m3fn)
        rows, columns = (n.clamp(min=0) // BLOCK for n in self._numbers(weight.tensor.name, x))
        scale = scale.view(()) if grid == (1, 1) else scale.view(grid)[rows][:, columns]
        return fp8.quantize(x, scale).view(torch.float8_e4m3fn)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.keys() | self._made.keys())

    def __len__(self) -> int:
        return len(self._source.keys() | self._made.keys())
