"""Copy plans as data: which slices of the source tensors make up the destination tensors.

A plan contains no arrays and only copies. It can be inverted (`inverse`), cut into pieces that fit a bounded
buffer (`bands`), expressed as byte ranges of a file (`byte_ranges`), or applied in memory (`apply`, on torch
tensors or numpy arrays).

    linear_qkv [128 64]  rows 0:32  ->  q [64 64] rows 0:32
                         rows 32:48 ->  k [32 64] rows 0:16   …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

Shape = tuple[int, ...]
#: One (start, stop) per axis.
Slices = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Region:
    """A part of a tensor."""

    name: str
    slices: Slices


@dataclass(frozen=True)
class Piece:
    """`destination[destination_slices] = source[source_slices]`, up to axes of length 1."""

    source: str
    source_slices: Slices
    destination: str
    destination_slices: Slices

    @property
    def elements(self) -> int:
        """Number of elements copied."""
        return prod(extent(self.source_slices))


@dataclass(frozen=True)
class Plan:
    """Pieces that make all destinations from the sources.

    Every element of every destination is in exactly one piece or in `filled`. Every element of every source
    is in exactly one piece or in `unused`. Only padding rows of a vocabulary are in `filled` or `unused`.
    """

    sources: Mapping[str, Shape]
    destinations: Mapping[str, Shape]
    pieces: tuple[Piece, ...]
    unused: tuple[Region, ...] = ()
    #: Written as zeros.
    filled: tuple[Region, ...] = ()

    def inverse(self) -> Plan:
        """Return the plan that makes the sources from the destinations."""
        back = tuple(
            Piece(p.destination, p.destination_slices, p.source, p.source_slices) for p in self.pieces
        )
        return Plan(self.destinations, self.sources, back, self.filled, self.unused)

    def making(self, destination: str) -> tuple[Piece, ...]:
        """Return the pieces of one destination, in the order of its rows."""
        return tuple(
            sorted(
                (p for p in self.pieces if p.destination == destination), key=lambda p: p.destination_slices
            )
        )

    def bands(self, max_elements: int) -> Plan:
        """Return the same plan in pieces of at most `max_elements` elements, but of at least one row.

        A piece is cut along its first axis that is longer than 1 (experts: within one expert).
        """
        cut = tuple(band for piece in self.pieces for band in _cut_piece(piece, max_elements))
        return Plan(self.sources, self.destinations, cut, self.unused, self.filled)

    def check(self) -> None:
        """Check that the plan uses every element exactly once.

        Raises:
            ValueError: an element is used twice or not at all, or the two sides of a piece differ in shape.
        """
        for piece in self.pieces:
            sides = [
                tuple(n for n in extent(s) if n != 1) for s in (piece.source_slices, piece.destination_slices)
            ]
            if sides[0] != sides[1]:
                raise ValueError(f"{piece}: the shapes of the two sides differ")
        read = [Region(p.source, p.source_slices) for p in self.pieces]
        written = [Region(p.destination, p.destination_slices) for p in self.pieces]
        _check_tiles("source", self.sources, [*read, *self.unused])
        _check_tiles("destination", self.destinations, [*written, *self.filled])


def extent(slices: Slices) -> Shape:
    """Return the shape of a slice."""
    return tuple(stop - start for start, stop in slices)


def whole(shape: Shape) -> Slices:
    """Return the slices of a whole tensor."""
    return tuple((0, n) for n in shape)


def band(shape: Shape, start: int, stop: int, axis: int = 0) -> Slices:
    """Return the slices that take [start, stop) of one axis and all of the other axes."""
    return tuple((start, stop) if i == axis else (0, n) for i, n in enumerate(shape))


def byte_ranges(shape: Shape, slices: Slices, item_size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) in bytes of the contiguous runs of a slice of a row-major tensor.

    The order is ascending, which is the order of the slice's elements. Whole rows are one run.
    """
    lengths = extent(slices)
    if not prod(lengths):
        return
    inner = len(shape)  # axes from here on are taken entirely
    while inner and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the axis before them is contiguous as well
    run = prod(lengths[inner:])
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    tail = sum(slices[i][0] * strides[i] for i in range(inner, len(shape)))
    for index in product(*(range(*slices[i]) for i in range(inner))):
        offset = tail + sum(i * s for i, s in zip(index, strides))
        yield offset * item_size, run * item_size


def apply(plan: Plan, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a plan in memory.

    Args:
        sources: torch tensors, or numpy arrays, with the names and shapes of the plan.

    Returns:
        New arrays by name. A destination has the dtype of its sources.

    Raises:
        ValueError: a source is missing or has the wrong shape, or sources of one destination differ in dtype.
    """
    for name, shape in plan.sources.items():
        if name not in sources:
            raise ValueError(f"no tensor {name!r} given: have {', '.join(sorted(sources)[:5])}")
        if tuple(sources[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(sources[name].shape)}, expected {shape}")
    result: dict[str, Any] = {}
    for piece in plan.pieces:
        source = sources[piece.source]
        if piece.destination not in result:
            result[piece.destination] = _empty_like(source, plan.destinations[piece.destination])
        target = result[piece.destination]
        if target.dtype != source.dtype:
            raise ValueError(
                f"{piece.destination} is made of {target.dtype} and of {source.dtype} ({piece.source})"
            )
        part = source[_slice_objects(piece.source_slices)].reshape(extent(piece.destination_slices))
        target[_slice_objects(piece.destination_slices)] = part
    for region in plan.filled:
        result[region.name][_slice_objects(region.slices)] = 0
    return result


def _slice_objects(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(*s) for s in slices)


def _empty_like(like: Any, shape: Shape) -> Any:
    if hasattr(like, "new_empty"):  # torch
        return like.new_empty(shape)
    import numpy

    return numpy.empty(shape, like.dtype)


def _cut_piece(piece: Piece, max_elements: int) -> Iterator[Piece]:
    if piece.elements <= max_elements:
        yield piece
        return
    axes = [
        next((i for i, n in enumerate(extent(s)) if n != 1), 0)
        for s in (piece.source_slices, piece.destination_slices)
    ]
    rows = extent(piece.source_slices)[axes[0]]
    step = max(1, max_elements * rows // piece.elements)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        source = _offset_slices(piece.source_slices, axes[0], start, stop)
        destination = _offset_slices(piece.destination_slices, axes[1], start, stop)
        yield Piece(piece.source, source, piece.destination, destination)


def _offset_slices(slices: Slices, axis: int, start: int, stop: int) -> Slices:
    begin = slices[axis][0]
    return (*slices[:axis], (begin + start, begin + stop), *slices[axis + 1 :])


def _check_tiles(side: str, shapes: Mapping[str, Shape], regions: list[Region]) -> None:
    by_name: dict[str, list[Slices]] = {name: [] for name in shapes}
    for region in regions:
        if region.name not in by_name:
            raise ValueError(f"{side} {region.name!r} is not a tensor of the plan")
        shape = shapes[region.name]
        inside = all(0 <= a <= b <= n for (a, b), n in zip(region.slices, shape))
        if len(region.slices) != len(shape) or not inside:
            raise ValueError(f"{side} {region.name}: {region.slices} is not inside its shape {shape}")
        by_name[region.name].append(region.slices)
    for name, slices in by_name.items():
        slices.sort()
        open_: list[Slices] = []  # slices that reach beyond the start of the next one
        for one in slices:
            open_ = [other for other in open_ if not one or other[0][1] > one[0][0]]
            for other in open_:
                if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other)):
                    raise ValueError(f"{side} {name}: {other} and {one} overlap")
            open_.append(one)
        covered, total = sum(prod(extent(s)) for s in slices), prod(shapes[name])
        if covered != total:
            raise ValueError(f"{side} {name}: {covered} of {total} elements are in a piece")
