"""A destination file as a stream: what stands in it, to the byte, before any of it is written.

A file is a list of parts, each literal bytes, then elements of one tensor, then literal bytes that may
depend on the elements' CRC32. Sizes are known beforehand, so an index can be made, disk space checked and
files given to several processes; and since a file is written in order, its checksum costs no second read.
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
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_nemotron3.checkpoint.files import atomic
from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.convert.crc32 import combine
from megatron_nemotron3.convert.plan import Slices, extent
from megatron_nemotron3.convert.stored import Reads
from megatron_nemotron3.convert.views import bands

if TYPE_CHECKING:
    import numpy

_T = TypeVar("_T")

#: Bytes of a band, the unit that is read, converted and written.
BAND = 8 << 20
#: Bytes written at once. For larger writes Linux takes larger pages into its cache, whose memory a virtual
#: machine must often get from its host first: 8 MiB at once took up to twice as long.
_WRITE = 256 << 10
#: Blocks made ahead: behind elements come a tail and the next head, then elements again.
_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Literal bytes, a slice of a tensor in row-major order, literal bytes."""

    head: bytes = b""
    tensor: str = ""
    slices: Slices = ()
    dtype: str = ""
    #: Bytes behind the elements, from their CRC32.
    tail: Callable[[int], bytes] | None = None
    tail_length: int = 0

    @property
    def data_length(self) -> int:
        """Bytes of the elements."""
        return prod(extent(self.slices)) * ITEM_SIZE[self.dtype] if self.tensor else 0

    @property
    def length(self) -> int:
        """Bytes of the part."""
        return len(self.head) + self.data_length + self.tail_length


@dataclass(frozen=True)
class FilePlan:
    """A file to write: its name below the folder, and its parts in order."""

    name: str
    parts: Sequence[Part]

    @property
    def length(self) -> int:
        """Bytes of the file."""
        return sum(part.length for part in self.parts)


def content(plan: FilePlan, source: Reads, *, finite: bool = True) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in order, in blocks of about `BAND` bytes.

    Raises:
        CheckpointError: a source cannot be read, or with `finite`, a value is NaN or infinite.
    """
    return (block for block, _ in _blocks(plan, source, finite))


def _blocks(plan: FilePlan, source: Reads, finite: bool) -> Iterator[tuple[bytes | memoryview, int]]:
    """The same, each block with its CRC32."""
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
                one = zlib.crc32(data)
                crc = combine(crc, one, len(data))
                yield data, one
        if part.tail is not None:
            tail = part.tail(crc)
            yield tail, zlib.crc32(tail)


#: Bits of the least value that is not finite, sign removed.
_INFINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF << 52}
#: Elements looked at at once: they stay in a core's cache.
_SOME = 1 << 16


def _check_finite(array: numpy.ndarray[Any, Any], part: Part, source: Reads) -> None:
    limit = _INFINITE[part.dtype]
    signless = (1 << (8 * array.itemsize - 1)) - 1
    for start in range(0, array.size, _SOME):
        if int((array[start : start + _SOME] & signless).max()) >= limit:
            raise CheckpointError(
                f"{source.folder}: {part.tensor} has values that are NaN or infinite: "
                "--allow-nonfinite copies them"
            )


def write(
    plan: FilePlan, source: Reads, path: Path, written: Callable[[int], None], *, finite: bool = True
) -> int:
    """Write a file that is complete when it has its name, and on the disk.

    Args:
        finite: refuse NaN and infinities.
        written: told the number of bytes of each block.

    Returns: the CRC32 of the file.

    Raises:
        CheckpointError: a source cannot be read.
        OSError: the file cannot be written.
    """
    crc = length = begun = 0
    with atomic(path) as temporary, open(temporary, "wb", buffering=0) as file:
        for block, one in _ahead(_blocks(plan, source, finite)):
            crc, length = combine(crc, one, len(block)), length + len(block)
            _write_all(file.fileno(), block)
            if length - begun > BAND // 2:
                _start_writing(file.fileno(), begun, length - begun)
                begun = length
            written(len(block))
        if length != plan.length:
            raise RuntimeError(f"{path}: {length:,} bytes were written, {plan.length:,} planned")
    return crc


def _ahead(items: Iterator[_T]) -> Iterator[_T]:
    """The items, made by another thread while those before them are used.

    Reading, checksums and writing leave Python's lock, so that they overlap.
    """
    end = object()
    with ThreadPoolExecutor(1) as thread:
        coming: deque[Future[Any]] = deque(thread.submit(next, items, end) for _ in range(_AHEAD))
        while (item := coming.popleft().result()) is not end:
            coming.append(thread.submit(next, items, end))
            yield item


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_WRITE]) :]


def _start_writing(descriptor: int, offset: int, length: int) -> None:
    """Have the kernel begin to write pages to the disk, so that the fsync at the end has little to wait for.

    Pages cannot be dropped before they are written, so this advice begins just that.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # it is only advice
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
