"""Compare two checkpoints of any kind, tensor by tensor: their Hugging Face views must be the same bits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megatron_nemotron3.checkpoints.convert.checksums import Unfinished, combine_crc32
from megatron_nemotron3.checkpoints.convert.plan import bands, whole
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.streams import BAND
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE
from megatron_nemotron3.common.processes import parallel_map

#: Tensors per work item.
_BATCH = 16


@dataclass(frozen=True)
class Difference:
    """A tensor that differs; `what` describes the difference in one line."""

    name: str
    what: str


@dataclass(frozen=True)
class Same:
    """A tensor that is equal bit by bit."""

    name: str
    elements: int
    crc32: int


def compare(
    a: TensorSource,
    b: TensorSource,
    *,
    workers: int = 1,
    report: Callable[[int], None] = lambda done: None,
) -> Iterator[Difference | Same]:
    """Compare all tensors; those that exist on one side only come first."""
    for name in a.tensors:
        if name not in b.tensors:
            yield Difference(name, "only the first has it")
    for name in b.tensors:
        if name not in a.tensors:
            yield Difference(name, "only the second has it")
    both = [name for name in a.tensors if name in b.tensors]
    batches = [both[i : i + _BATCH] for i in range(0, len(both), _BATCH)]

    def work(
        names: Sequence[str], count: Callable[[int], None]
    ) -> tuple[list[Difference | Same], list[Unfinished]]:
        found = [_compare_tensor(a, b, name, count) for name in names]
        return found, [side.reads.take() for side in (a, b)]

    unfinished: tuple[list[Unfinished], ...] = ([], [])
    for found, rests in parallel_map(work, batches, workers=workers, report=report):
        yield from found
        for rest, kept in zip(rests, unfinished):
            kept.append(rest)
    for side, kept in zip((a, b), unfinished):
        for rest in kept:
            side.reads.merge(rest)
        side.reads.finish()


def _compare_tensor(
    a: TensorSource, b: TensorSource, name: str, count: Callable[[int], None]
) -> Difference | Same:
    one, other = a.tensors[name], b.tensors[name]
    for what, x, y in (("shape", list(one.shape), list(other.shape)), ("type", one.dtype, other.dtype)):
        if x != y:
            return Difference(name, f"{what} {x} and {y}")
    differ, crcs = 0, [0, 0]
    first: list[int] | None = None
    for band in bands(whole(one.shape), BAND // ITEM_SIZE[one.dtype]):
        mine, theirs = a.read(name, band), b.read(name, band)
        unequal = mine != theirs
        count(mine.nbytes)
        if unequal.any():
            if first is None:
                import numpy

                at = numpy.argwhere(unequal)[0].tolist()
                first = [start + i for (start, _), i in zip(band, at)]
            differ += int(unequal.sum())
        crc = combine_crc32(crcs[0], a.reads.crc32(mine), mine.nbytes)
        crcs = [crc, zlib.crc32(theirs.reshape(-1).view("u1"), crcs[1]) if differ else crc]
    if differ:
        return Difference(
            name,
            f"{differ:,} of {prod(one.shape):,} elements, first at {first}; CRC32 {crcs[0]:08x} "
            f"and {crcs[1]:08x}",
        )
    return Same(name, prod(one.shape), crcs[0])
