"""Lazy access to tensor slices in files.

Every reader (safetensors, torch_dist) lists the blocks of files that hold the parts of each tensor.
`FileSource.read` assembles a slice from these blocks, with one `pread` per contiguous run and no memory
beyond the slice. Files are not memory-mapped, so the resident memory of the process does not grow with them.

Elements are not interpreted: a slice of a bfloat16 tensor is an array of unsigned 16-bit integers.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

from megatron_nemotron3.checkpoints.archive import ArchiveError, ArchiveRecord, read_into
from megatron_nemotron3.checkpoints.convert.checksums import Reads
from megatron_nemotron3.checkpoints.convert.plan import Bits, Shape, Slices, extent
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.checkpoints.read import opened
from megatron_nemotron3.models.tensors import Row

#: Largest number of open files.
_OPEN = 64
#: Bytes read per call from a block whose rows are not contiguous in the slice.
_SPAN = 8 << 20


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
    #: A function if the file must be opened to find the location.
    location: Location | Callable[[], Location]

    def locate(self) -> Location:
        return self.location if isinstance(self.location, Location) else self.location()


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a source: torch's dtype name, global shape, and blocks that tile it (none in a view)."""

    dtype: str
    shape: Shape
    blocks: tuple[Block, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_SIZE[self.dtype]


class TensorSource:
    """Tensors by name, of which slices are read on demand."""

    folder: Path
    tensors: Mapping[str, SourceTensor]
    #: Path below `folder` -> size in bytes, of every file that holds tensors.
    files: Mapping[str, int]
    #: The table's row of each tensor that a conversion makes.
    rows: Mapping[str, Row] = MappingProxyType({})
    #: What was read of the files; empty for a source that is no file.
    reads = Reads(Path())

    def read(self, name: str, slices: Slices) -> Bits:
        """Read a slice as raw bits, into a new C-contiguous array of its shape."""
        raise NotImplementedError


class FileSource(TensorSource):
    """Tensors in files."""

    def __init__(self, folder: Path, tensors: Mapping[str, SourceTensor], files: Mapping[str, int]) -> None:
        self.folder, self.tensors, self.files, self.reads = folder, tensors, files, Reads(folder)
        self._open: OrderedDict[Path, int] = OrderedDict()
        # A process that opens one checkpoint after another must not keep all files open.
        weakref.finalize(self, _close, self._open).atexit = False
        self._sorted: dict[str, tuple[list[int], int, list[Block]]] = {}

    def read(self, name: str, slices: Slices) -> Bits:
        import numpy

        tensor = self.tensors[name]
        result = numpy.empty(extent(slices), bits(tensor.dtype))
        filled = 0
        for block in self._overlapping_blocks(name, slices):
            starts = [max(a, o) for (a, _), o in zip(slices, block.offsets)]
            stops = [min(b, o + n) for (_, b), o, n in zip(slices, block.offsets, block.sizes)]
            if any(a >= b for a, b in zip(starts, stops)):
                continue
            window = tuple(slice(a - s, b - s) for a, b, (s, _) in zip(starts, stops, slices))
            inside = tuple((a - o, b - o) for a, b, o in zip(starts, stops, block.offsets))
            self._read_block(result[window] if window else result, block, inside)
            filled += prod(b - a for a, b in zip(starts, stops))
        if filled != result.size:
            raise CheckpointError(
                f"{self.folder}: the parts of {name} at {slices} hold {filled:,} of {result.size:,} elements"
            )
        return result

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        _close(self._open)

    def _overlapping_blocks(self, name: str, slices: Slices) -> list[Block]:
        """List the blocks that may hold a part of the slice. A stack of experts has hundreds of blocks."""
        blocks = self.tensors[name].blocks
        if len(blocks) < 8 or not slices:
            return list(blocks)
        if name not in self._sorted:
            ordered = sorted(blocks, key=lambda b: b.offsets)
            self._sorted[name] = (
                [b.offsets[0] for b in ordered],
                max(b.sizes[0] for b in ordered),
                ordered,
            )
        starts, longest, ordered = self._sorted[name]
        first, last = slices[0]
        return ordered[bisect_left(starts, first - longest + 1) : bisect_left(starts, last)]

    def _read_block(self, target: Bits, block: Block, inside: Slices) -> None:
        """Read [inside], a slice in the indices of the block, into `target`."""
        import numpy

        location, item = block.locate(), target.itemsize
        first = location.offset + item * sum(a * step for (a, _), step in zip(inside, location.stride))
        shape = extent(inside)
        span = 1 + sum((n - 1) * step for n, step in zip(shape, location.stride))
        descriptor = self._descriptor(location.path)
        if span == target.size and _is_row_major(shape, location.stride):
            if target.flags.c_contiguous:
                self._pread(descriptor, target, first, location)
            else:
                run = numpy.empty(shape, target.dtype)
                self._pread(descriptor, run, first, location)
                target[...] = run
            return
        # Rows of a wider matrix, or a transposed matrix: read as many rows per call as _SPAN allows.
        step = location.stride[0]
        one = span - (shape[0] - 1) * step  # elements that a single row spans
        rows = max(1, 1 + (_SPAN // item - one) // step) if step else shape[0]
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            some = (count, *shape[1:])
            flat = numpy.empty(one + (count - 1) * step, target.dtype)
            self._pread(descriptor, flat, first + start * step * item, location)
            strides = tuple(stride * item for stride in location.stride)
            target[start : start + count] = numpy.lib.stride_tricks.as_strided(flat, some, strides)

    def _pread(self, descriptor: int, target: Bits, offset: int, location: Location) -> None:
        try:
            read_into(descriptor, memoryview(target.reshape(-1).view("u1")), offset)
        except OSError as problem:
            raise CheckpointError(f"{location.path}: {problem.strerror} at byte {offset:,}") from None
        except ArchiveError as problem:
            raise CheckpointError(f"{location.path}: {problem}") from None
        if location.record is not None:
            self.reads.add(location.path, location.record, offset, target)

    def _descriptor(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        with opened(path) as found:
            descriptor = os.dup(found)
        if len(self._open) >= _OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = descriptor
        return descriptor


def _close(opened: OrderedDict[Path, int]) -> None:
    while opened:
        os.close(opened.popitem()[1])


def bits(dtype: str) -> str:
    """Numpy's unsigned integer type of the size of torch's `dtype`."""
    return f"u{ITEM_SIZE[dtype]}"


def row_major(shape: Shape) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _is_row_major(shape: Shape, stride: tuple[int, ...]) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(stride)):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True
