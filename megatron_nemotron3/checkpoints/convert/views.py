"""Views of tensor sources: converted between Megatron and Hugging Face, cast, or renamed.

A view reads from its source only when a slice is read, so a chain of views needs no more memory than the
slice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megatron_nemotron3.checkpoints.convert.inventory import TensorMapping
from megatron_nemotron3.checkpoints.convert.plan import CopyPiece, Slices, extent
from megatron_nemotron3.checkpoints.convert.sources import Block, BlockSource, SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.metadata import CheckpointError


class Converted(BlockSource):
    """The tensors of one side of `mappings`, made from those of the other side."""

    def __init__(self, source: TensorSource, mappings: Iterable[TensorMapping], *, to_hf: bool) -> None:
        super().__init__()
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
        self._blocks: dict[str, list[Block]] = {}

    def blocks(self, name: str) -> Sequence[Block]:
        if name not in self._blocks:
            plan = self._mappings[name].to_hf()
            for piece in (plan if self.to_hf else plan.inverse()).pieces:
                begin = tuple(start for start, _ in piece.destination_slices)
                block = Block(begin, extent(piece.destination_slices), piece)
                self._blocks.setdefault(piece.destination, []).append(block)
        return self._blocks[name]

    def made_of(self, name: str) -> Iterator[tuple[TensorSource, str]]:
        mapping = self._mappings[name]
        for tensor in mapping.megatron if self.to_hf else mapping.hf:
            yield from self._source.made_of(tensor.name)

    def padded(self, name: str) -> bool:
        return not self.to_hf and self._mappings[name].spelling.rule == "vocabulary"

    def read_block(self, tensor: SourceTensor, block: Block, inside: Slices) -> Tensor:
        piece = block.place
        assert isinstance(piece, CopyPiece)
        return self._source.read(piece.source, _source_slices(piece, inside)).reshape(extent(inside))


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

    def made_of(self, name: str) -> Iterator[tuple[TensorSource, str]]:
        yield from self._source.made_of(name)


class Selected(TensorSource):
    """Some tensors of a source, under other names."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self.folder, self.files, self._source, self._names = source.folder, source.files, source, names
        self.tensors = {new: source.tensors[old] for new, old in names.items()}
        self.rows = {new: source.rows[old] for new, old in names.items() if old in source.rows}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._source.read(self._names[name], slices)

    def made_of(self, name: str) -> Iterator[tuple[TensorSource, str]]:
        yield from self._source.made_of(self._names[name])


class Joined(TensorSource):
    """The tensors of two sources with different names; files of the second by absolute paths, for the job."""

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


def _source_slices(piece: CopyPiece, inside: Slices) -> Slices:
    """Return the slices of a piece's source that make [inside], in the indices of its destination's part."""
    long = iter([one for one, n in zip(inside, extent(piece.destination_slices)) if n != 1])
    result = []
    for start, stop in piece.source_slices:
        a, b = (0, 1) if stop - start == 1 else next(long)
        result.append((start + a, start + b))
    return tuple(result)
