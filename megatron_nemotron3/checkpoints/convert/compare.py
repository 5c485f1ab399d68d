"""Compare two checkpoints of any kind, tensor by tensor: their Hugging Face views must be the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megatron_nemotron3.checkpoints.convert.plan import bands, whole
from megatron_nemotron3.checkpoints.convert.sources import TensorSource, raw
from megatron_nemotron3.checkpoints.convert.streams import BAND
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE
from megatron_nemotron3.common.processes import parallel_map

#: Tensors per work item.
_BATCH = 64


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

    def work(names: Sequence[str], count: Callable[[int], None]) -> list[Difference | Same]:
        return [_compare_tensor(a, b, name, count) for name in names]

    for found in parallel_map(work, batches, workers=workers, report=report):
        yield from found


def _compare_tensor(
    a: TensorSource, b: TensorSource, name: str, count: Callable[[int], None]
) -> Difference | Same:
    one, other = a.tensors[name], b.tensors[name]
    for what, x, y in (("shape", list(one.shape), list(other.shape)), ("type", one.dtype, other.dtype)):
        if x != y:
            return Difference(name, f"{what} {x} and {y}")
    differ = 0
    first: list[int] | None = None
    for band in bands(whole(one.shape), BAND // ITEM_SIZE[one.dtype]):
        mine, theirs = raw(a.read(name, band)), raw(b.read(name, band))
        count(mine.nbytes)
        if not mine.equal(theirs):
            unequal = mine != theirs
            if first is None:
                first = [start + i for (start, _), i in zip(band, unequal.nonzero()[0].tolist())]
            differ += int(unequal.sum())
    if differ:
        return Difference(name, f"{differ:,} of {prod(one.shape):,} elements, first at {first}")
    return Same(name, prod(one.shape))
