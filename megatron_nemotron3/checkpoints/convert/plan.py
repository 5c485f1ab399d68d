"""Copy plans as data: which slices of the source tensors make up the destination tensors.

A plan contains no arrays and only copies. It can be inverted (`inverse`) and applied in memory (`apply`, on
torch tensors or numpy arrays). `views.Converted` applies plans to slices of files.

    linear_qkv [128 64]  rows 0:32  ->  q [64 64] rows 0:32
                         rows 32:48 ->  k [32 64] rows 0:16   …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

Shape = tuple[int, ...]
#: One (start, stop) per axis.
Slices = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CopyPiece:
    """`destination[destination_slices] = source[source_slices]`, up to axes of length 1."""

    source: str
    source_slices: Slices
    destination: str
    destination_slices: Slices


@dataclass(frozen=True)
class CopyPlan:
    """Pieces that make all destinations from the sources.

    Every element of every destination and of every source is in exactly one piece, but for the padding rows
    of a vocabulary, which are zeros.
    """

    sources: Mapping[str, Shape]
    destinations: Mapping[str, Shape]
    pieces: tuple[CopyPiece, ...]

    def inverse(self) -> CopyPlan:
        """Return the plan that makes the sources from the destinations."""
        back = tuple(
            CopyPiece(p.destination, p.destination_slices, p.source, p.source_slices) for p in self.pieces
        )
        return CopyPlan(self.destinations, self.sources, back)


def extent(slices: Slices) -> Shape:
    """Return the shape of a slice."""
    return tuple([stop - start for start, stop in slices])


def whole(shape: Shape) -> Slices:
    """Return the slices of a whole tensor."""
    return tuple([(0, n) for n in shape])


def band(shape: Shape, start: int, stop: int, axis: int = 0) -> Slices:
    """Return the slices that take [start, stop) of one axis and all of the other axes."""
    return tuple((start, stop) if i == axis else (0, n) for i, n in enumerate(shape))


def bands(slices: Slices, max_elements: int) -> Iterator[Slices]:
    """Cut a slice into slices of at most `max_elements`, but at least one row.

    The cut is along the first axis that is longer than 1.
    """
    lengths = extent(slices)
    axis = next((i for i, n in enumerate(lengths) if n != 1), None)
    if axis is None or prod(lengths) <= max_elements:
        yield slices
        return
    row = prod(lengths) // lengths[axis]
    step = max(1, max_elements // row)
    start, stop = slices[axis]
    for begin in range(start, stop, step):
        yield (*slices[:axis], (begin, min(begin + step, stop)), *slices[axis + 1 :])


def apply(plan: CopyPlan, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a plan in memory."""
    for name, shape in plan.sources.items():
        if name not in sources:
            raise ValueError(f"no tensor {name!r} given: have {', '.join(sorted(sources)[:5])}")
        if tuple(sources[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(sources[name].shape)}, expected {shape}")
    result: dict[str, Any] = {}
    for piece in plan.pieces:
        source = sources[piece.source]
        if piece.destination not in result:
            result[piece.destination] = _zeros_like(source, plan.destinations[piece.destination])
        target = result[piece.destination]
        if target.dtype != source.dtype:
            raise ValueError(
                f"{piece.destination} is made of {target.dtype} and of {source.dtype} ({piece.source})"
            )
        part = source[_slice_objects(piece.source_slices)].reshape(extent(piece.destination_slices))
        target[_slice_objects(piece.destination_slices)] = part
    return result


def _slice_objects(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(*s) for s in slices)


def _zeros_like(like: Any, shape: Shape) -> Any:
    if hasattr(like, "new_zeros"):  # torch
        return like.new_zeros(shape)
    import numpy

    return numpy.zeros(shape, like.dtype)
