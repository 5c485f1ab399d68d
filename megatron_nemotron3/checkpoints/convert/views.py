"""Lazy views of tensor sources: converted between Megatron and Hugging Face, cast, or renamed.

A view reads from its source only when a slice is read, so a chain of views needs no more memory than the
slice. A conversion writes `Converted(Cast(FileSource))` in bands of rows.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.checksums import JoinedReads, Reads
from megatron_nemotron3.checkpoints.convert.inventory import TensorMapping
from megatron_nemotron3.checkpoints.convert.plan import Bits, CopyPiece, Slices, extent
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource, bits
from megatron_nemotron3.checkpoints.metadata import CheckpointError


class Converted(TensorSource):
    """The tensors of one side of `mappings`, made from those of the other side."""

    def __init__(self, source: TensorSource, mappings: Iterable[TensorMapping], *, to_hf: bool) -> None:
        self.folder, self.files, self.to_hf = source.folder, source.files, to_hf
        self.reads = source.reads
        self._source = source
        self._mappings: dict[str, TensorMapping] = {}
        tensors: dict[str, SourceTensor] = {}
        for mapping in mappings:
            mine, theirs = (mapping.hf, mapping.megatron) if to_hf else (mapping.megatron, mapping.hf)
            for tensor in theirs:
                if source.tensors[tensor.name].shape != tensor.shape:
                    raise CheckpointError(
                        f"{source.folder}: {tensor.name} has shape "
                        f"{list(source.tensors[tensor.name].shape)}, the model's is {list(tensor.shape)}"
                    )
            kinds = {source.tensors[tensor.name].dtype for tensor in theirs}
            if len(kinds) > 1:
                raise CheckpointError(
                    f"{source.folder}: {', '.join(t.name for t in theirs[:5])} are one tensor on the other "
                    f"side, but have {len(kinds)} types, {' and '.join(sorted(kinds))}: give --dtype"
                )
            for tensor in mine:
                tensors[tensor.name] = SourceTensor(min(kinds), tensor.shape)
                self._mappings[tensor.name] = mapping
        self.tensors = tensors
        self.rows = {name: mapping.row for name, mapping in self._mappings.items()}
        self._cached: tuple[TensorMapping | None, dict[str, list[CopyPiece]]] = (None, {})

    def read(self, name: str, slices: Slices) -> Bits:
        import numpy

        pieces = self._pieces_of(name)
        if len(pieces) == 1 and extent(pieces[0].destination_slices) == self.tensors[name].shape:
            return self._source.read(pieces[0].source, _source_slices(pieces[0], slices)).reshape(
                extent(slices)
            )
        shape = extent(slices)
        first, last = slices[0]  # pieces are sorted bands of rows
        begin = max(0, bisect_right(pieces, first, key=_first_row) - 1)
        parts = []
        for piece in pieces[begin : bisect_left(pieces, last, key=_first_row)]:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(slices, piece.destination_slices))
            if common == slices:  # mostly one expert of a stack
                return self._source.read(piece.source, _source_slices(piece, common)).reshape(shape)
            if all(a < b for a, b in common):
                parts.append((piece, common))
        covered = sum(prod(extent(common)) for _, common in parts) == prod(shape)
        make = numpy.empty if covered else numpy.zeros  # zeros: padded rows
        result = make(shape, bits(self.tensors[name].dtype))
        for piece, common in parts:
            part = self._source.read(piece.source, _source_slices(piece, common))
            window = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, slices))
            result[window] = part.reshape(extent(common))
        return result

    def _pieces_of(self, name: str) -> list[CopyPiece]:
        """Return the pieces of a tensor; those of the last mapping are cached."""
        mapping = self._mappings[name]
        if self._cached[0] is not mapping:
            plan = mapping.to_hf() if self.to_hf else mapping.to_hf().inverse()
            pieces: dict[str, list[CopyPiece]] = {}
            for piece in sorted(plan.pieces, key=lambda p: p.destination_slices):
                pieces.setdefault(piece.destination, []).append(piece)
            self._cached = (mapping, pieces)
        return self._cached[1][name]


class Cast(TensorSource):
    """The tensors of a source in another type, rounded to nearest even; some keep their type."""

    def __init__(self, source: TensorSource, dtype: str, *, keep: Callable[[str], bool]) -> None:
        self.folder, self.files, self.reads = source.folder, source.files, source.reads
        self._source = source
        self.tensors = {
            name: tensor if keep(name) else SourceTensor(dtype, tensor.shape)
            for name, tensor in source.tensors.items()
        }

    def read(self, name: str, slices: Slices) -> Bits:
        array = self._source.read(name, slices)
        before, after = self._source.tensors[name].dtype, self.tensors[name].dtype
        return array if before == after else cast(array, before, after)


class Selected(TensorSource):
    """Some tensors of a source, under other names."""

    def __init__(self, source: TensorSource, names: dict[str, str]) -> None:
        self.folder, self.files, self._source, self._names = source.folder, source.files, source, names
        self.reads = source.reads
        self.tensors = {new: source.tensors[old] for new, old in names.items()}
        self.rows = {new: source.rows[old] for new, old in names.items() if old in source.rows}

    def read(self, name: str, slices: Slices) -> Bits:
        return self._source.read(self._names[name], slices)


class Joined(TensorSource):
    """The tensors of two sources with different names.

    Files of the second are named by their absolute paths, so that a job watches and verifies them, too.
    """

    def __init__(self, first: TensorSource, second: TensorSource) -> None:
        self.folder = first.folder
        others = {os.path.join(second.folder.absolute(), name): size for name, size in second.files.items()}
        self.files = {**first.files, **others}
        self.reads = JoinedReads(first.reads, second.reads)
        self._parts = (first, second)
        self.tensors = {**first.tensors, **second.tensors}
        self.rows = {**first.rows, **second.rows}

    def read(self, name: str, slices: Slices) -> Bits:
        first, second = self._parts
        return (first if name in first.tensors else second).read(name, slices)


class Arrays(TensorSource):
    """Small tensors in memory."""

    def __init__(self, folder: Path, arrays: Mapping[str, tuple[str, Bits]]) -> None:
        self.folder, self.files, self.reads = folder, {}, Reads(folder)
        self.tensors = {name: SourceTensor(dtype, array.shape) for name, (dtype, array) in arrays.items()}
        self._arrays = {name: array for name, (_, array) in arrays.items()}

    def read(self, name: str, slices: Slices) -> Bits:
        return self._arrays[name][tuple(slice(*s) for s in slices)].copy()


def cast(array: Bits, before: str, after: str) -> Bits:
    """Cast raw bits from one floating-point type to another."""
    import torch

    return as_bits(as_tensor(array, before).to(getattr(torch, after)))


def as_tensor(array: Bits, dtype: str) -> Any:
    """Return a torch tensor that shares the memory of raw bits."""
    import torch

    # torch has few unsigned types; signed types of the same size have the same bits.
    signed = array.view(f"i{array.itemsize}") if array.itemsize > 1 else array
    return torch.from_numpy(signed.reshape(-1)).view(getattr(torch, dtype)).view(array.shape)


def as_bits(tensor: Any) -> Bits:
    """Return the raw bits of a torch tensor; they share its memory."""
    import torch

    size = tensor.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.detach().contiguous().view(kind).numpy().view(f"u{size}")


def _first_row(piece: CopyPiece) -> int:
    return piece.destination_slices[0][0]


def _source_slices(piece: CopyPiece, destination: Slices) -> Slices:
    """Return the slices of a piece's source that make [destination], a part of its destination."""
    long = [i for i, n in enumerate(extent(piece.destination_slices)) if n != 1]
    offsets = [(destination[i][0] - piece.destination_slices[i][0], destination[i]) for i in long]
    result, at = [], 0
    for (start, _), n in zip(piece.source_slices, extent(piece.source_slices)):
        if n == 1:
            result.append((start, start + 1))
        else:
            shift, (a, b) = offsets[at]
            result.append((start + shift, start + shift + b - a))
            at += 1
    return tuple(result)
