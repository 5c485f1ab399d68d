"""Plan destination files to the byte, and write them as streams.

A file is a list of parts. Each part has literal bytes, elements of one tensor, and literal bytes that may
depend on the CRC32 of the elements. All sizes are known before anything is written, so an index can be made,
disk space can be checked, and files can be distributed to processes. A file is written in order, so its
checksum needs no second read.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from megatron_nemotron3.checkpoints.convert.checksums import combine_crc32
from megatron_nemotron3.checkpoints.convert.plan import Bits, Slices, bands, extent
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.common.files import atomic

_T = TypeVar("_T")
Block = bytes | memoryview

#: Size in bytes of a band, the unit that is read, converted and written.
BAND = 8 << 20
#: Bytes per write. For larger writes Linux uses larger pages in its cache, and a virtual machine must often
#: get their memory from its host first: writes of 8 MiB took up to twice as long.
_WRITE = 256 << 10
#: Number of blocks prepared ahead: elements are followed by a tail, the next head, and elements again.
_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Literal bytes, then a slice of a tensor in row-major order, then literal bytes."""

    head: bytes = b""
    tensor: str = ""
    slices: Slices = ()
    dtype: str = ""
    #: Makes the bytes after the elements from their CRC32.
    tail: Callable[[int], bytes] | None = None
    tail_length: int = 0

    @property
    def data_length(self) -> int:
        return prod(extent(self.slices)) * ITEM_SIZE[self.dtype] if self.tensor else 0

    @property
    def length(self) -> int:
        return len(self.head) + self.data_length + self.tail_length


@dataclass(frozen=True)
class FilePlan:
    """A file to write: its path below the folder, and its parts in order."""

    name: str
    parts: Sequence[Part]

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)


def blocks(plan: FilePlan, source: TensorSource, *, finite: bool = True) -> Iterator[tuple[Block, int]]:
    """Yield the bytes of a file in order, in blocks of about `BAND` bytes, each with its CRC32."""
    for part in plan.parts:
        if part.head:
            yield part.head, zlib.crc32(part.head)
        crc = 0
        if part.tensor:
            for band in bands(part.slices, BAND // ITEM_SIZE[part.dtype]):
                array = source.read(part.tensor, band).reshape(-1)
                if finite and part.dtype in _INFINITE:
                    _check_finite(array, part, source)
                data = memoryview(array.view("u1"))
                one = source.reads.crc32(array)
                crc = combine_crc32(crc, one, len(data))
                yield data, one
        if part.tail is not None:
            tail = part.tail(crc)
            yield tail, zlib.crc32(tail)


#: Bits of the smallest value that is not finite, without the sign.
_INFINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF << 52}
#: Elements checked per step: few enough to stay in the cache of a core.
_FINITE_STEP = 1 << 16


def _check_finite(array: Bits, part: Part, source: TensorSource) -> None:
    limit = _INFINITE[part.dtype]
    signless = (1 << (8 * array.itemsize - 1)) - 1
    for start in range(0, array.size, _FINITE_STEP):
        if int((array[start : start + _FINITE_STEP] & signless).max()) >= limit:
            raise CheckpointError(
                f"{source.folder}: {part.tensor} has values that are NaN or infinite: "
                "--allow-nonfinite copies them"
            )


def write(
    plan: FilePlan, source: TensorSource, path: Path, written: Callable[[int], None], *, finite: bool = True
) -> int:
    """Write a file atomically, and return its CRC32. `written` is called with the bytes of each block."""
    crc = length = begun = 0
    with atomic(path) as temporary, open(temporary, "wb", buffering=0) as file:
        for block, one in prefetched(blocks(plan, source, finite=finite)):
            crc, length = combine_crc32(crc, one, len(block)), length + len(block)
            _write_all(file.fileno(), block)
            if length - begun > BAND // 2:
                _start_writing(file.fileno(), begun, length - begun)
                begun = length
            written(len(block))
        if length != plan.length:
            raise RuntimeError(f"{path}: {length:,} bytes were written, {plan.length:,} planned")
    return crc


def prefetched(items: Iterator[_T]) -> Iterator[_T]:
    """Yield the items while a thread prepares the next ones.

    Reading, checksums and writing release Python's global lock, so they overlap.
    """
    end = object()
    with ThreadPoolExecutor(1) as thread:
        coming: deque[Future[Any]] = deque(thread.submit(next, items, end) for _ in range(_AHEAD))
        while (item := coming.popleft().result()) is not end:
            coming.append(thread.submit(next, items, end))
            yield item


def _write_all(descriptor: int, data: Block) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_WRITE]) :]


def _start_writing(descriptor: int, offset: int, length: int) -> None:
    """Make the kernel begin to write pages to the disk, so that the fsync at the end is short."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only advice
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
