"""Tensors where they lie: blocks of files, and any slice of them as raw bits.

Every reader (safetensors, torch_dist, mp_rank) says which block of which file holds which part of which
tensor; `Source.read` puts a slice together from the blocks, with one `pread` for each contiguous run and no
memory beyond the slice. Nothing is mapped, so the process's resident memory does not grow with the files.

Elements are not interpreted: an array of bfloat16 comes as unsigned 16-bit integers.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.convert.plan import Shape, Slices, extent

if TYPE_CHECKING:
    import numpy

#: Open files at most.
_OPEN = 64
#: Bytes read at once from a block whose rows are not contiguous in the slice.
_SPAN = 8 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a block lies: element [i, j] at byte offset + (i * stride[0] + j * stride[1]) * item size."""

    path: Path
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a tensor that begins at `offsets` and has shape `sizes`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    #: A function where the place is only known after a look into the file.
    where: Layout | Callable[[], Layout]

    def layout(self) -> Layout:
        """Where the block lies.

        Raises:
            CheckpointError: the file is damaged.
        """
        return self.where if isinstance(self.where, Layout) else self.where()


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor: torch's dtype name, global shape, blocks that tile it."""

    dtype: str
    shape: Shape
    blocks: tuple[Block, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * ITEM_SIZE[self.dtype]


class Reads:
    """What every source has: tensors by name, and slices of them."""

    folder: Path
    tensors: Mapping[str, SourceTensor]
    #: Name below `folder` -> size in bytes, of every file the tensors lie in.
    files: Mapping[str, int]

    def read(self, name: str, slices: Slices) -> numpy.ndarray[Any, Any]:
        """The raw bits of a slice, in a new C-contiguous array of its shape.

        Raises:
            CheckpointError: a file cannot be read, is too short, or is damaged.
        """
        raise NotImplementedError


class Source(Reads):
    """Tensors that lie in files."""

    def __init__(self, folder: Path, tensors: Mapping[str, SourceTensor], files: Mapping[str, int]) -> None:
        self.folder, self.tensors, self.files = folder, tensors, files
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._sorted: dict[str, tuple[list[int], int, list[Block]]] = {}

    def read(self, name: str, slices: Slices) -> numpy.ndarray[Any, Any]:
        import numpy

        tensor = self.tensors[name]
        result = numpy.empty(extent(slices), bits(tensor.dtype))
        filled = 0
        for block in self._blocks(name, slices):
            starts = [max(a, o) for (a, _), o in zip(slices, block.offsets)]
            stops = [min(b, o + n) for (_, b), o, n in zip(slices, block.offsets, block.sizes)]
            if any(a >= b for a, b in zip(starts, stops)):
                continue
            window = tuple(slice(a - s, b - s) for a, b, (s, _) in zip(starts, stops, slices))
            inside = tuple((a - o, b - o) for a, b, o in zip(starts, stops, block.offsets))
            self._fill(result[window] if window else result, block, inside)
            filled += prod(b - a for a, b in zip(starts, stops))
        if filled != result.size:
            raise CheckpointError(
                f"{self.folder}: the parts of {name} at {slices} hold {filled:,} of {result.size:,} elements"
            )
        return result

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _blocks(self, name: str, slices: Slices) -> list[Block]:
        """Those that may hold a part of the slice: experts are hundreds of blocks along the first axis."""
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

    def _fill(self, target: numpy.ndarray[Any, Any], block: Block, inside: Slices) -> None:
        """Copy [inside] of a block, a slice in the block's own indices, to `target`."""
        import numpy

        layout, item = block.layout(), target.itemsize
        first = layout.offset + item * sum(a * step for (a, _), step in zip(inside, layout.stride))
        shape = extent(inside)
        span = 1 + sum((n - 1) * step for n, step in zip(shape, layout.stride))
        descriptor = self._descriptor(layout.path)
        if span == target.size and _row_major(shape, layout.stride):
            if target.flags.c_contiguous:
                _pread(descriptor, _buffer(target), first, layout.path)
            else:
                run = numpy.empty(shape, target.dtype)
                _pread(descriptor, _buffer(run), first, layout.path)
                target[...] = run
            return
        # Rows of a wider matrix, or a transposed one: as many rows at once as a bounded span allows.
        step = layout.stride[0]
        one = span - (shape[0] - 1) * step  # elements that a single row spans
        rows = max(1, 1 + (_SPAN // item - one) // step) if step else shape[0]
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            some = (count, *shape[1:])
            flat = numpy.empty(one + (count - 1) * step, target.dtype)
            _pread(descriptor, _buffer(flat), first + start * step * item, layout.path)
            strides = tuple(stride * item for stride in layout.stride)
            target[start : start + count] = numpy.lib.stride_tricks.as_strided(flat, some, strides)

    def _descriptor(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise CheckpointError(f"{path}: {problem.strerror}") from None
        if len(self._open) >= _OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = descriptor
        return descriptor


def bits(dtype: str) -> str:
    """numpy's unsigned type as wide as an element of torch's type `dtype`."""
    return f"u{ITEM_SIZE[dtype]}"


def row_major(shape: Shape) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous array."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _row_major(shape: Shape, stride: tuple[int, ...]) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(stride)):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def _buffer(array: numpy.ndarray[Any, Any]) -> memoryview:
    return memoryview(array.reshape(-1).view("u1"))


def _pread(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    done, length = 0, len(view)
    while done < length:
        try:
            count = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
        except OSError as problem:
            raise CheckpointError(f"{path}: {problem.strerror} at byte {offset + done:,}") from None
        if count == 0:
            raise CheckpointError(
                f"{path}: the file ends at byte {offset + done:,}, inside the {length:,} from {offset:,}"
            )
        done += count
