"""How one module lies on ranks: parallel sizes, first rank, and what its boundary looks like.

The same as upstream's `HyperCommGrid`, as data: any dimension that is not tp, cp or pp makes data lanes
(dp, and gtp_remat or others of the kind; of several the first varies fastest, as over ranks). Expert
dimensions live in other views of a grid, which are not read: they split a module's ranks anew, not its batch.
No process group, no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: Dimensions that do not split the batch.
MODEL_DIMENSIONS = ("tp", "cp", "pp")
ORDER = ("tp", "cp", "pp", "dp")


class Grid(Protocol):
    """What is read of a `megatron.core.hyper_comm_grid.HyperCommGrid`."""

    shape: list[int]
    dim_names: list[str]
    rank_offset: int


@dataclass(frozen=True)
class Layout:
    """Ranks [offset, offset + size) of one module.

    dimensions: (name, size), the first varies fastest over ranks (Megatron's `order`).
    sequence_parallel: at the boundary rows are split over tp: the sequence of a language model that receives
        (`--sequence-parallel`), the output rows of an encoder that sends.

    Raises:
        ValueError: a size or the offset is too small, or a dimension comes twice.
    """

    dimensions: tuple[tuple[str, int], ...]
    offset: int = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dimensions]
        if len(set(names)) != len(names):
            raise ValueError(f"layout {self}: a dimension comes twice")
        for name, size in self.dimensions:
            if size < 1:
                raise ValueError(f"layout {self}: {name}={size}: use sizes from 1")
        if self.offset < 0:
            raise ValueError(f"layout {self}: offset={self.offset}: use an offset from 0")

    @classmethod
    def of(
        cls,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        dp: int = 1,
        offset: int = 0,
        sp: bool = False,
        order: Sequence[str] = ORDER,
    ) -> Layout:
        """The usual four dimensions, in Megatron's order unless told otherwise.

        Raises:
            ValueError: `order` leaves out a dimension, or names one that is not of the four.
        """
        sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        if sorted(order) != sorted(sizes):
            raise ValueError(f"order {'-'.join(order)}: use each of {', '.join(ORDER)} once")
        return cls(tuple((name, sizes[name]) for name in order), offset, sp)

    @classmethod
    def from_grid(cls, grid: Grid, sequence_parallel: bool = False) -> Layout:
        """The layout of upstream's grid (its base view)."""
        return cls(tuple(zip(grid.dim_names, grid.shape, strict=True)), grid.rank_offset, sequence_parallel)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """ "tp=2,dp=4,offset=8,sp" -> a layout; `str` of it gives the same back.

        "order=dp-tp" is for ranks that lie otherwise than tp-cp-pp-dp, the first dimension fastest; only
        there may other dimensions be named (order=tp-gtp_remat-dp); those it leaves out have size 1.

        Raises:
            ValueError: an unknown word, one given twice, a number that is none, or a size without its place.
        """
        given: dict[str, str] = {}
        for word in text.split(","):
            name, _, value = (part.strip() for part in word.partition("="))
            if name in given:
                raise ValueError(f"layout {text!r}: {name} is given twice")
            given[name] = value if "=" in word else "yes"
        order = given.pop("order", "-".join(ORDER)).split("-")
        words = {"sp": given.pop("sp", ""), "offset": given.pop("offset", "0")}
        for name, value in {**given, "offset": words["offset"]}.items():
            if name not in (*order, "offset") or not (value.isascii() and value.isdecimal()):
                raise ValueError(
                    f"layout {text!r}: {name if value == 'yes' else f'{name}={value}'!r} has no meaning: use "
                    f"{', '.join(f'{d}=' for d in order)}, offset= and sp, separated by commas"
                )
        if words["sp"] not in ("", "yes"):
            raise ValueError(f"layout {text!r}: sp={words['sp']}: use sp alone, or leave it out")
        sizes = {name: int(given.get(name, 1)) for name in order}
        if len(sizes) < len(order):
            raise ValueError(f"layout {text!r}: order names a dimension twice")
        return cls(tuple(sizes.items()), int(words["offset"]), bool(words["sp"]))

    def __str__(self) -> str:
        some = {name: size for name, size in self.dimensions if size != 1}
        words = [f"{name}={size}" for name, size in some.items()] or ["tp=1"]
        if list(some) != [name for name in ORDER if name in some]:
            words.append("order=" + "-".join(some))
        words += [f"offset={self.offset}"] * (self.offset != 0) + ["sp"] * self.sequence_parallel
        return ",".join(words)

    def size_of(self, name: str) -> int:
        """Size of a dimension; 1 if there is none of that name."""
        return dict(self.dimensions).get(name, 1)

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.size_of("tp")

    @property
    def cp(self) -> int:
        """Context-parallel size."""
        return self.size_of("cp")

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.size_of("pp")

    @property
    def dp(self) -> int:
        """Data lanes: the product of all other dimensions."""
        return math.prod(size for name, size in self.dimensions if name not in MODEL_DIMENSIONS)

    @property
    def size(self) -> int:
        """Ranks."""
        return math.prod(size for _, size in self.dimensions)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.offset, self.offset + self.size)

    @property
    def sliced(self) -> bool:
        """Whether ranks of one lane need different rows when this layout receives."""
        return self.cp > 1 or (self.sequence_parallel and self.tp > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Name of a dimension -> index of the rank in it.

        Raises:
            ValueError: the rank is not of this layout.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in layout {self}, ranks {self.offset}-{self.ranks[-1]}")
        rest, found = rank - self.offset, {}
        for name, size in self.dimensions:
            found[name], rest = rest % size, rest // size
        return found

    def lanes(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of a pipeline stage by data lane; in a lane, context rank by context rank, tp fastest.

        Raises:
            ValueError: there is no such stage.
        """
        if not 0 <= stage < self.pp:
            raise ValueError(f"layout {self} has no pipeline stage {stage}: use 0 to {self.pp - 1}")
        return _lanes(self, stage)

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks of a pipeline stage, lane by lane."""
        return tuple(rank for lane in self.lanes(stage) for rank in lane)


@functools.lru_cache(maxsize=256)
def _lanes(layout: Layout, stage: int) -> tuple[tuple[int, ...], ...]:
    found: dict[int, dict[int, int]] = {}
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        if at.get("pp", 0) != stage:
            continue
        lane, stride = 0, 1
        for name, size in layout.dimensions:
            if name not in MODEL_DIMENSIONS:
                lane, stride = lane + at[name] * stride, stride * size
        found.setdefault(lane, {})[at.get("cp", 0) * layout.tp + at.get("tp", 0)] = rank
    return tuple(tuple(rank for _, rank in sorted(members.items())) for _, members in sorted(found.items()))
