"""Plan destination files, and write them as streams of bounded memory.

A file is a list of parts: a safetensors file is its header and then elements, a .distcp file a row of
archives. It is the unit of a restart and of the work of a process.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.plan import Slices, bands, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.checkpoints.write import Writable, overhead, write_tensor
from megatron_nemotron3.common.files import atomic

#: Size in bytes of a band, the unit that is read, converted and written.
BAND = 8 << 20
#: Bytes per write. For larger writes Linux uses larger pages in its cache, and a virtual machine must often
#: get their memory from its host first: writes of 8 MiB took up to twice as long.
_WRITE = 256 << 10


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of a tensor in row-major order, or literal bytes."""

    data: bytes = b""
    tensor: str = ""
    slices: Slices = ()
    dtype: str = ""
    #: Of an object in the index of a torch_dist folder.
    key: str = ""

    @property
    def length(self) -> int:
        return prod(extent(self.slices)) * ITEM_SIZE[self.dtype] if self.tensor else len(self.data)


@dataclass(frozen=True)
class FilePlan:
    """A file to write: its path below the folder, and its parts in order."""

    name: str
    parts: Sequence[Part]
    #: The elements of each part are in an archive of torch.save.
    archives: bool = False

    @cached_property
    def length(self) -> int:
        around = (overhead(p.dtype, extent(p.slices)) for p in self.parts if self.archives and p.tensor)
        return sum(part.length for part in self.parts) + sum(around)


_T = TypeVar("_T")


def grouped(items: Iterable[_T], limit: int, size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Cut items into groups, in order: as many as fit into `limit` bytes, but at least one."""
    group: list[_T] = []
    length = 0
    for item in items:
        if group and length + size(item) > limit:
            yield group
            group, length = [], 0
        group.append(item)
        length += size(item)
    if group:
        yield group


class OutputFile:
    """A file that is written in order: its length, and its CRC32, which a thread computes meanwhile."""

    def __init__(self, file: Writable, written: Callable[[int], None] = lambda length: None) -> None:
        self.length = 0
        self._file, self._written, self._crc = file, written, 0
        self._small = bytearray()
        self._thread, self._checked = ThreadPoolExecutor(1), Future[None]()
        self._checked.set_result(None)

    def write(self, data: Any) -> int:
        """Append bytes; short ones are collected."""
        view = memoryview(data).cast("B")
        self.length += len(view)
        if len(view) < _WRITE:
            self._small += view
            if len(self._small) < _WRITE:
                return len(view)
        self._flush()
        if len(view) >= _WRITE:
            self._put(view)
        return len(view)

    def meanwhile(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Let the thread do `work`, before it computes the CRC32 of what is written next."""
        return self._thread.submit(work, *arguments)

    @property
    def crc32(self) -> int:
        """Of all bytes, which are then written."""
        self._flush()
        self._checked.result()
        return self._crc

    def _flush(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._put(memoryview(small))

    def _put(self, view: memoryview) -> None:
        self._checked.result()
        self._checked = self._thread.submit(self._update, view)
        for start in range(0, len(view), _WRITE):
            piece = view[start : start + _WRITE]
            while piece:
                piece = piece[self._file.write(piece) or len(piece) :]
        self._written(len(view))

    def _update(self, view: memoryview) -> None:
        self._crc = zlib.crc32(view, self._crc)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


def write_parts(
    plan: FilePlan, source: TensorSource, out: OutputFile, *, finite: bool = True
) -> dict[str, Any]:
    """Write the parts of a file. Returns "bytes", "crc32", and of archives the "places" (offset, length)."""
    places = []
    for part in plan.parts:
        begin = out.length
        if not part.tensor:
            out.write(part.data)
        elif plan.archives:
            write_tensor(out, part.dtype, extent(part.slices), _bands(part, source, out, finite))
        else:
            for band in _bands(part, source, out, finite):
                out.write(band)
        places.append((begin, out.length - begin))
    entry = {"bytes": out.length, "crc32": f"{out.crc32:08x}"}
    return {**entry, "places": places} if plan.archives else entry


def write(
    plan: FilePlan, source: TensorSource, path: Path, written: Callable[[int], None], *, finite: bool = True
) -> dict[str, Any]:
    """Write a file atomically; `written` is called with numbers of bytes. Returns what `write_parts` does."""
    with atomic(path) as temporary, open(temporary, "wb", buffering=0) as file:
        begun = 0

        def count(length: int) -> None:
            nonlocal begun
            if out.length - begun > BAND // 2:
                out.meanwhile(_start_writing, file.fileno(), begun, out.length - begun)
                begun = out.length
            written(length)

        with OutputFile(file, count) as out:
            return write_parts(plan, source, out, finite=finite)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _bands(part: Part, source: TensorSource, out: OutputFile, finite: bool) -> Iterator[memoryview]:
    finite = finite and part.dtype in _FLOATS
    for band in bands(part.slices, BAND // ITEM_SIZE[part.dtype]):
        tensor = source.read(part.tensor, band)
        checked: Future[None] | None = None
        if finite and tensor.nbytes >= _WRITE:
            checked = out.meanwhile(_check_finite, tensor, part, source)
        elif finite:
            _check_finite(tensor, part, source)
        yield as_bytes(tensor)
        if checked is not None:
            checked.result()


#: Types of weights, which should have no NaN; in quantized ones such a code is refused elsewhere.
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def _check_finite(tensor: Tensor, part: Part, source: TensorSource) -> None:
    if not _is_finite(tensor):
        where = f"{source.folder}: {part.tensor}"
        for one, name in source.made_of(part.tensor):
            stored = one.tensors[name]
            if stored.blocks and not all(
                _is_finite(one.read(name, band))
                for band in bands(whole(stored.shape), BAND // ITEM_SIZE[stored.dtype])
            ):
                where = shown(f"{stored.blocks[0].locate().path}: {name}")
                break
        raise CheckpointError(f"{where} has values that are NaN or infinite: --allow-nonfinite copies them")


def _is_finite(tensor: Tensor) -> bool:
    # torch.aminmax is half as fast on longer tensors.
    pieces = tensor.reshape(-1).split(_WRITE // tensor.element_size()) if tensor.numel() else ()
    return all(isfinite(one.item()) for some in pieces for one in some.aminmax())


def _start_writing(descriptor: int, offset: int, length: int) -> None:
    """Make the kernel begin to write pages to the disk, so that the fsync at the end is short."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only advice
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
