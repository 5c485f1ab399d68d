"""Views of tensor sources: converted between Megatron and Hugging Face, cast, or renamed.

A view reads from its source only when a slice is read, so a chain of views needs no more memory than the
slice.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.inventory import TensorMapping
from megatron_nemotron3.checkpoints.convert.plan import CopyPiece, Slices, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.metadata import CheckpointError


class Converted(TensorSource):
    """The tensors of one side of `mappings`, made from those of the other side."""

    def __init__(self, source: TensorSource, mappings: Iterable[TensorMapping], *, to_hf: bool) -> None:
        self.folder, self.files, self.to_hf = source.folder, source.files, to_hf
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
        self._pieces: dict[str, list[CopyPiece]] = {}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        pieces, tensor = self._pieces_of(name), self.tensors[name]
        slices = whole(tensor.shape) if slices is None else slices
        shape = extent(slices)
        if len(pieces) == 1 and extent(pieces[0].destination_slices) == tensor.shape:
            return self._source.read(pieces[0].source, _source_slices(pieces[0], slices)).reshape(shape)
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
        make = torch.empty if covered else torch.zeros  # zeros: padded rows
        result = make(shape, dtype=tensor.torch_dtype)
        for piece, common in parts:
            part = self._source.read(piece.source, _source_slices(piece, common))
            window = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, slices))
            result[window] = part.reshape(extent(common))
        return result

    def _pieces_of(self, name: str) -> list[CopyPiece]:
        """Return the pieces of a tensor, in order of their rows."""
        if name not in self._pieces:
            mapping = self._mappings[name]
            plan = mapping.to_hf() if self.to_hf else mapping.to_hf().inverse()
            for piece in sorted(plan.pieces, key=lambda p: p.destination_slices):
                self._pieces.setdefault(piece.destination, []).append(piece)
        return self._pieces[name]


class Cast(TensorSource):
    """The tensors of a source in another type, rounded to nearest even; some keep their type."""

    def __init__(self, source: TensorSource, dtype: str, *, keep: Callable[[str], bool]) -> None:
        self.folder, self.files, self._source = source.folder, source.files, source
        self.tensors = {
            name: tensor if keep(name) else SourceTensor(dtype, tensor.shape)
            for name, tensor in source.tensors.items()
        }

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._source.read(name, slices).to(self.tensors[name].torch_dtype)


class Selected(TensorSource):
    """Some tensors of a source, under other names."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self.folder, self.files, self._source, self._names = source.folder, source.files, source, names
        self.tensors = {new: source.tensors[old] for new, old in names.items()}
        self.rows = {new: source.rows[old] for new, old in names.items() if old in source.rows}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._source.read(self._names[name], slices)


class Joined(TensorSource):
    """The tensors of two sources with different names.

    Files of the second are named by their absolute paths, so that a job watches them, too.
    """

    def __init__(self, first: TensorSource, second: TensorSource) -> None:
        self.folder = first.folder
        others = {os.path.join(second.folder.absolute(), name): size for name, size in second.files.items()}
        self.files = {**first.files, **others}
        self._parts = (first, second)
        self.tensors = {**first.tensors, **second.tensors}
        self.rows = {**first.rows, **second.rows}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        first, second = self._parts
        return (first if name in first.tensors else second).read(name, slices)


class InMemory(TensorSource):
    """Tensors in memory."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self.folder, self.files, self._tensors = folder, {}, tensors
        self.tensors = {
            name: SourceTensor(str(one.dtype).removeprefix("torch."), tuple(one.shape))
            for name, one in tensors.items()
        }

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        tensor = self._tensors[name]
        return tensor if slices is None else tensor[tuple(slice(*s) for s in slices)]


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
