"""Tensors by name, of which slices are read on demand.

Every reader lists the blocks of files that hold the parts of each tensor. A slice inside one block is a view
of the mapped file, anything else is put together in new memory. Nobody writes to a tensor. The CRC32 of a
block is compared when it is used for the first time.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_nemotron3.checkpoints.convert.plan import CopyPiece, Shape, Slices, extent, whole
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, CheckpointError, explained
from megatron_nemotron3.checkpoints.read import ArchiveRecord, MappedFiles
from megatron_nemotron3.models.tensors import Row

if TYPE_CHECKING:  # much that only names tensors starts without torch
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a block: element [i, j] is at byte offset + (i * stride[0] + j * stride[1]) * item size."""

    path: Path
    offset: int
    stride: tuple[int, ...]
    #: The record with a CRC32 that contains the block; None in a file without checksums.
    record: ArchiveRecord | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a tensor that begins at `offsets` and has shape `sizes`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    #: In a file, or a function if the file must be opened to find it; in a view, a part of its source.
    place: Location | Callable[[], Location] | CopyPiece

    def locate(self) -> Location:
        at = self.place if isinstance(self.place, (Location, CopyPiece)) else self.place()
        assert isinstance(at, Location)
        return at


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a source: torch's dtype name, global shape, and blocks that tile it (none in a view)."""

    dtype: str
    shape: Shape
    blocks: tuple[Block, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_SIZE[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found


class TensorSource:
    """Tensors by name, of which slices are read on demand."""

    folder: Path
    tensors: Mapping[str, SourceTensor]
    #: Path below `folder` -> size in bytes, of every file that holds tensors.
    files: Mapping[str, int]
    #: The table's row of each tensor that a conversion makes.
    rows: Mapping[str, Row] = MappingProxyType({})

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Read a tensor, or a slice of it. The result may be a view of a file: it must not be written to."""
        raise NotImplementedError

    def made_of(self, name: str) -> Iterator[tuple[TensorSource, str]]:
        """Yield the tensors of files that a tensor is made of; where a view does not say: the tensor."""
        yield self, name


class BlockSource(TensorSource):
    """Tensors that are made of blocks. A slice inside one block is not copied."""

    def __init__(self) -> None:
        self._sorted: dict[str, tuple[list[int], int, list[Block]]] = {}

    def blocks(self, name: str) -> Sequence[Block]:
        """The blocks of a tensor, which do not overlap."""
        raise NotImplementedError

    def read_block(self, tensor: SourceTensor, block: Block, inside: Slices) -> Tensor:
        """Read [inside], a slice in the indices of the block."""
        raise NotImplementedError

    def padded(self, name: str) -> bool:
        """Whether what is in no block of a tensor is zero, and not missing."""
        return False

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        import torch

        tensor = self.tensors[name]
        slices = whole(tensor.shape) if slices is None else slices
        shape, begin = extent(slices), tuple([start for start, _ in slices])
        make, result, filled = torch.zeros if self.padded(name) else torch.empty, None, 0
        for block in self._overlapping_blocks(name, slices):
            if block.sizes == shape and block.offsets == begin and 0 not in shape:  # mostly
                return self.read_block(tensor, block, whole(shape))
            common = tuple(
                (max(a, o), min(b, o + n))
                for (a, b), o, n in zip(slices, block.offsets, block.sizes, strict=True)
            )
            if any(a >= b for a, b in common):
                continue
            inside = tuple((a - o, b - o) for (a, b), o in zip(common, block.offsets))
            part = self.read_block(tensor, block, inside)
            if common == slices:
                return part
            if result is None:
                result = make(shape, dtype=tensor.torch_dtype)
            result[tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, slices))] = part
            filled += part.numel()
        if filled != prod(shape) and make is torch.empty:
            raise CheckpointError(
                f"{self.folder}: the parts of {name} at {slices} hold {filled:,} of {prod(shape):,} elements"
            )
        return make(shape, dtype=tensor.torch_dtype) if result is None else result

    def _overlapping_blocks(self, name: str, slices: Slices) -> Sequence[Block]:
        """List the blocks that may hold a part of the slice. A stack of experts has hundreds of blocks."""
        blocks = self.blocks(name)
        if len(blocks) < 8 or not slices:
            return blocks
        if name not in self._sorted:
            ordered = sorted(blocks, key=lambda b: b.offsets)
            longest = max(b.sizes[0] for b in ordered)
            self._sorted[name] = ([b.offsets[0] for b in ordered], longest, ordered)
        starts, longest, ordered = self._sorted[name]
        first, last = slices[0]
        return ordered[bisect_left(starts, first - longest + 1) : bisect_left(starts, last)]


class FileSource(BlockSource):
    """Tensors in files."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, SourceTensor],
        files: Mapping[str, int],
        opened: MappedFiles | None = None,
    ) -> None:
        super().__init__()
        self.folder, self.tensors, self.files = folder, tensors, files
        self.opened = MappedFiles() if opened is None else opened
        self._checked: set[tuple[Path, int]] = set()

    def blocks(self, name: str) -> Sequence[Block]:
        return self.tensors[name].blocks

    def read_block(self, tensor: SourceTensor, block: Block, inside: Slices) -> Tensor:
        import torch

        at, shape, item = block.locate(), extent(inside), ITEM_SIZE[tensor.dtype]
        first = at.offset + item * sum(a * step for (a, _), step in zip(inside, at.stride))
        span = item * (1 + sum((n - 1) * step for n, step in zip(shape, at.stride)))
        with explained(at.path):
            file = self.opened[at.path]
            if at.record is not None and (key := (at.path, at.record.offset)) not in self._checked:
                at.record.check(file)
                self._checked.add(key)
            _silence()
            data = torch.frombuffer(file(first, span), dtype=torch.uint8)
        return data.view(tensor.torch_dtype).as_strided(shape, at.stride)


@cache
def _silence() -> None:
    """Trigger unseen the warning that torch prints once: a buffer cannot be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(bytes(1), dtype=torch.uint8)


def row_major(shape: Shape) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def owned(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy: products of a view have other bits where it lies at another place of its file."""
    import torch

    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def raw(tensor: Tensor) -> Tensor:
    """The bits of a tensor, as integers of its size: equal bits are equal numbers, NaN or not."""
    import torch

    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(kind)
