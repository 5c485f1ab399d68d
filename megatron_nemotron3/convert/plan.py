"""Which slices of which tensors make up which others, as data: a plan has no arrays in it.

A plan says how some destination tensors are made of some source tensors by copying alone. It can be
turned round (`inverse`), cut into pieces small enough for a bounded buffer (`bands`), read as byte ranges
of a file (`byte_ranges`), or carried out in memory (`apply`, on torch tensors or numpy arrays).

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
#: One (start, stop) for each axis.
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
        """Elements copied."""
        return prod(extent(self.source_slices))


@dataclass(frozen=True)
class Plan:
    """Pieces that make all of the destinations of the sources.

    Every element of every destination is in exactly one piece or in `filled`; every element of every source
    is in exactly one piece or in `unused`. The two hold the rows that pad a vocabulary, and nothing else.
    """

    sources: Mapping[str, Shape]
    destinations: Mapping[str, Shape]
    pieces: tuple[Piece, ...]
    unused: tuple[Region, ...] = ()
    #: Written as zeros.
    filled: tuple[Region, ...] = ()

    def inverse(self) -> Plan:
        """The plan that makes the sources of the destinations."""
        back = tuple(
            Piece(p.destination, p.destination_slices, p.source, p.source_slices) for p in self.pieces
        )
        return Plan(self.destinations, self.sources, back, self.filled, self.unused)

    def making(self, destination: str) -> tuple[Piece, ...]:
        """The pieces of one destination, in the order of its rows."""
        return tuple(
            sorted(
                (p for p in self.pieces if p.destination == destination), key=lambda p: p.destination_slices
            )
        )

    def bands(self, max_elements: int) -> Plan:
        """The same plan in pieces of at most `max_elements` elements, but of no less than one row.

        A piece is cut along its first axis that is longer than 1 (experts: within one expert).
        """
        cut = tuple(band for piece in self.pieces for band in _bands(piece, max_elements))
        return Plan(self.sources, self.destinations, cut, self.unused, self.filled)

    def check(self) -> None:
        """Check what the class promises.

        Raises:
            ValueError: an element used twice or not at all, or a piece whose two sides differ in shape.
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
    """The shape of a slice."""
    return tuple(stop - start for start, stop in slices)


def whole(shape: Shape) -> Slices:
    """The slices that take all of a tensor."""
    return tuple((0, n) for n in shape)


def band(shape: Shape, start: int, stop: int, axis: int = 0) -> Slices:
    """The slices that take [start, stop) of one axis and all of the others."""
    return tuple((start, stop) if i == axis else (0, n) for i, n in enumerate(shape))


def byte_ranges(shape: Shape, slices: Slices, item_size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) in bytes of the contiguous runs that a slice of a row-major tensor is made of.

    In ascending order, which is the order of the slice's own elements. Whole rows are one run.
    """
    lengths = extent(slices)
    if not prod(lengths):
        return
    inner = len(shape)  # axes from here on are taken whole
    while inner and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the axis before them is contiguous, too
    run = prod(lengths[inner:])
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    tail = sum(slices[i][0] * strides[i] for i in range(inner, len(shape)))
    for index in product(*(range(*slices[i]) for i in range(inner))):
        offset = tail + sum(i * s for i, s in zip(index, strides))
        yield offset * item_size, run * item_size


def apply(plan: Plan, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Carry a plan out in memory.

    Args:
        sources: torch tensors or numpy arrays (one kind) of the plan's names and shapes.

    Returns: new arrays by name. A destination has the type (dtype) of its sources.

    Raises:
        ValueError: a source is missing or has another shape, or sources of one destination differ in type.
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
            result[piece.destination] = _empty(source, plan.destinations[piece.destination])
        target = result[piece.destination]
        if target.dtype != source.dtype:
            raise ValueError(
                f"{piece.destination} is made of {target.dtype} and of {source.dtype} ({piece.source})"
            )
        part = source[_index(piece.source_slices)].reshape(extent(piece.destination_slices))
        target[_index(piece.destination_slices)] = part
    for region in plan.filled:
        result[region.name][_index(region.slices)] = 0
    return result


def _index(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(*s) for s in slices)


def _empty(like: Any, shape: Shape) -> Any:
    if hasattr(like, "new_empty"):  # torch
        return like.new_empty(shape)
    import numpy

    return numpy.empty(shape, like.dtype)


def _bands(piece: Piece, max_elements: int) -> Iterator[Piece]:
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
        source = _within(piece.source_slices, axes[0], start, stop)
        destination = _within(piece.destination_slices, axes[1], start, stop)
        yield Piece(piece.source, source, piece.destination, destination)


def _within(slices: Slices, axis: int, start: int, stop: int) -> Slices:
    begin = slices[axis][0]
    return (*slices[:axis], (begin + start, begin + stop), *slices[axis + 1 :])


def _check_tiles(side: str, shapes: Mapping[str, Shape], regions: list[Region]) -> None:
    by_name: dict[str, list[Slices]] = {name: [] for name in shapes}
    for region in regions:
        if region.name not in by_name:
            raise ValueError(f"{side} {region.name!r} is not one of the plan's")
        shape = shapes[region.name]
        inside = all(0 <= a <= b <= n for (a, b), n in zip(region.slices, shape))
        if len(region.slices) != len(shape) or not inside:
            raise ValueError(f"{side} {region.name}: {region.slices} is not inside its shape {shape}")
        by_name[region.name].append(region.slices)
    for name, slices in by_name.items():
        slices.sort()
        open_: list[Slices] = []  # those that reach beyond where the next one starts
        for one in slices:
            open_ = [other for other in open_ if not one or other[0][1] > one[0][0]]
            for other in open_:
                if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other)):
                    raise ValueError(f"{side} {name}: {other} and {one} overlap")
            open_.append(one)
        covered, total = sum(prod(extent(s)) for s in slices), prod(shapes[name])
        if covered != total:
            raise ValueError(f"{side} {name}: {covered} of {total} elements are in a piece")
