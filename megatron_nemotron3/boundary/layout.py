"""The parallel layout of one module: its parallel sizes and its ranks.

A data lane is one data-parallel replica of the module: any dimension that is not tp, cp or pp makes data
lanes (dp, gtp_remat and others). If there are several, the first varies fastest, as over ranks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

#: Dimensions that do not split the batch.
MODEL_DIMENSIONS = ("tp", "cp", "pp")
#: Megatron's default order of dimensions; the first varies fastest over ranks.
ORDER = ("tp", "cp", "pp", "dp")
#: How the context ranks of a sending module share the rows of a lane (`partition.rows_held`).
SHARES = ("media", "zigzag", "contiguous")


@dataclass(frozen=True)
class Layout:
    """The ranks [offset, offset + size) of one module.

    dimensions: (name, size); the first varies fastest over ranks (Megatron's `order`).
    sequence_parallel: whether rows at the boundary are split over tp: the sequence of a receiving language
        model (`--sequence-parallel`), or the output rows of a sending encoder.
    share: how the context ranks of a sending module share its rows, one of `SHARES`; "" with CP 1.

    Raises:
        ValueError: a size is below 1, the offset is negative, a dimension is given twice, or `share` is
            unknown.
    """

    dimensions: tuple[tuple[str, int], ...]
    offset: int = 0
    sequence_parallel: bool = False
    share: str = ""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dimensions]
        if len(set(names)) != len(names):
            raise ValueError(f"layout {self}: a dimension is given twice: give each once")
        for name, size in self.dimensions:
            if size < 1:
                raise ValueError(f"layout {self}: {name}={size}: use sizes from 1")
        if self.offset < 0:
            raise ValueError(f"layout {self}: offset={self.offset}: use an offset from 0")
        if self.share and self.share not in SHARES:
            raise ValueError(f"layout {self}: share={self.share}: use one of {', '.join(SHARES)}")

    @classmethod
    def of(cls, *, offset: int = 0, sp: bool = False, share: str = "", **sizes: int) -> Layout:
        """A layout of tp, cp, pp and dp in Megatron's order; sizes that are left out are 1."""
        if unknown := sizes.keys() - set(ORDER):
            raise ValueError(f"dimensions {sorted(unknown)}: use {', '.join(ORDER)}, or Layout(dimensions)")
        return cls(tuple((name, sizes.get(name, 1)) for name in ORDER), offset, sp, share)

    @classmethod
    def from_grid(cls, grid: Any, sequence_parallel: bool = False, share: str = "") -> Layout:
        """The layout of upstream's `HyperCommGrid`. Its views of experts do not split the batch."""
        dimensions = tuple(zip(grid.dim_names, grid.shape, strict=True))
        return cls(dimensions, grid.rank_offset, sequence_parallel, share)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse text such as "tp=2,dp=4,offset=8,sp" or "cp=2,share=media"; `str` is the inverse.

        "order=dp-tp" gives an order of dimensions other than tp-cp-pp-dp, the first fastest. Only with it
        may other dimensions be named (order=tp-gtp_remat-dp); dimensions that it leaves out have size 1.
        Other words and sizes are a ValueError.
        """
        given: dict[str, str] = {}
        for word in text.split(","):
            name, _, value = (part.strip() for part in word.partition("="))
            if name in given:
                raise ValueError(f"layout {text!r}: {name} is given twice")
            given[name] = value if "=" in word else "yes"
        order = given.pop("order", "-".join(ORDER)).split("-")
        sp, offset, share = given.pop("sp", ""), given.pop("offset", "0"), given.pop("share", "")
        for name, value in {**given, "offset": offset}.items():
            if name not in (*order, "offset") or not (value.isascii() and value.isdecimal()):
                raise ValueError(
                    f"layout {text!r}: {name if value == 'yes' else f'{name}={value}'!r} has no meaning: use "
                    f"{', '.join(f'{d}=' for d in order)}, offset= and sp, separated by commas; an encoder "
                    "with cp= also needs share="
                )
        if sp not in ("", "yes"):
            raise ValueError(f"layout {text!r}: sp={sp}: use sp alone, or leave it out")
        sizes = {name: int(given.get(name, 1)) for name in order}
        if len(sizes) < len(order):
            raise ValueError(f"layout {text!r}: order names a dimension twice")
        return cls(tuple(sizes.items()), int(offset), bool(sp), share)

    def __str__(self) -> str:
        some = {name: size for name, size in self.dimensions if size != 1}
        parts = [f"{name}={size}" for name, size in some.items()] or ["tp=1"]
        if list(some) != [name for name in ORDER if name in some]:
            parts.append("order=" + "-".join(some))
        parts += [f"offset={self.offset}"] * (self.offset != 0)
        parts += [f"share={self.share}"] * bool(self.share) + ["sp"] * self.sequence_parallel
        return ",".join(parts)

    def size_of(self, name: str) -> int:
        return dict(self.dimensions).get(name, 1)

    @property
    def tp(self) -> int:
        return self.size_of("tp")

    @property
    def cp(self) -> int:
        return self.size_of("cp")

    @property
    def pp(self) -> int:
        return self.size_of("pp")

    @property
    def dp(self) -> int:
        """Number of data lanes: the product of all other dimensions."""
        return math.prod(size for name, size in self.dimensions if name not in MODEL_DIMENSIONS)

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.dimensions)

    @property
    def ranks(self) -> range:
        """The ranks of all stages."""
        return range(self.offset, self.offset + self.size)

    @property
    def sliced(self) -> bool:
        """Whether the ranks of a lane have different rows: those of their positions, or their share."""
        return self.cp > 1 or (self.sequence_parallel and self.tp > 1)

    def check_sender(self) -> None:
        """ValueError if the context ranks of a sending module share its rows, and it is not said how."""
        if self.cp > 1 and not self.share:
            raise ValueError(
                f"the source layout {self} has CP={self.cp}: say how its context ranks share the rows of a "
                f"lane (share: {', '.join(SHARES)}), or use CP 1 in modules that send"
            )

    def same_rows(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Cut the ranks of a lane into groups that have the same rows."""
        size = len(ranks) if not self.sliced else 1 if self.sequence_parallel else self.tp
        return tuple(ranks[i : i + size] for i in range(0, len(ranks), size))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Map each dimension to the index of the rank in it; ValueError for a rank of another layout."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in layout {self}, ranks {self.offset}-{self.ranks[-1]}")
        rest, found = rank - self.offset, {}
        for name, size in self.dimensions:
            found[name], rest = rest % size, rest // size
        return found

    def lane_of(self, rank: int) -> int:
        stage = self.coordinates(rank).get("pp", 0)
        return next(lane for lane, ranks in enumerate(self.lanes(stage)) if rank in ranks)

    def lanes(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of a pipeline stage by data lane; within a lane tp varies fastest, then cp."""
        if not 0 <= stage < self.pp:
            raise ValueError(f"layout {self} has no pipeline stage {stage}: use 0 to {self.pp - 1}")
        return _cached_lanes(self, stage)


@functools.lru_cache(maxsize=256)
def _cached_lanes(layout: Layout, stage: int) -> tuple[tuple[int, ...], ...]:
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
