"""The bytes of checkpoint files, and archives of torch.save in them: records, pickles, elements of tensors.

A torch_dist chunk is such an archive inside a .distcp file; common.pt is a single one. It is a zip file whose
records are not compressed, so the elements of a tensor are a plain range of the file.

torch_dist and safetensors files hold tensors as they are in memory, so a mapped file is read without a copy,
and the pages belong to the system's cache, not to this process. Touching a page that the file no longer has
ends the process (SIGBUS). So every read compares its bounds with the size at the mapping, and that with the
present size; only a file that is truncated while what was read is still used ends the process.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.metadata import (
    INDEX,
    ITEM_SIZE,
    MOST_AXES,
    ArchiveError,
    StoredObject,
    TensorChunk,
    explained,
)
from megatron_nemotron3.checkpoints.pickles import Pickle, Refused
from megatron_nemotron3.common.files import open_outside

#: (device, inode) of a placeholder of a remote file (`remote`) -> what fetches a range: offset, length.
REMOTE: dict[tuple[int, int], Callable[[int, int], bytes]] = {}


class MappedFile:
    """The bytes of one regular file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(path), open_outside(path) as file:
            found = os.fstat(file.fileno())
            self.size = found.st_size
            self._fetch = REMOTE.get((found.st_dev, found.st_ino))
            self._kept = (0, b"")
            self._map: mmap.mmap | None = None
            self._view = memoryview(b"")
            if self.size and self._fetch is None:
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
                self._view = memoryview(self._map)

    def __call__(self, offset: int, length: int) -> memoryview:
        """The bytes [offset, offset + length), not to be written to.

        Raises:
            ArchiveError: the file is shorter, or has become so.
        """
        if not 0 <= offset <= offset + length <= self.size:
            raise ArchiveError(f"the file ends at byte {self.size:,}, inside the {length:,} from {offset:,}")
        if self._map is not None and (now := self._map.size()) < self.size:
            raise ArchiveError(f"the file had {self.size:,} bytes when it was opened, now it has {now:,}")
        if self._fetch is None:
            return self._view[offset : offset + length]
        begin, kept = self._kept
        if not begin <= offset <= offset + length <= begin + len(kept):
            begin, kept = self._kept = offset, self._fetch(offset, length)
        return memoryview(kept)[offset - begin : offset - begin + length]

    def blocks(self, offset: int, length: int, size: int = 64 << 20) -> Iterator[memoryview]:
        """The same bytes, of at most `size` at a time."""
        for start in range(offset, offset + length, size):
            yield self(start, min(size, offset + length - start))


class HeldBytes(MappedFile):
    """Bytes in memory, read as a file."""

    def __init__(self, data: bytes) -> None:
        self.path, self.size, self._fetch, self._map = Path("bytes"), len(data), None, None
        self._view = memoryview(data)


class MappedFiles(dict[Path, MappedFile]):
    """Files by path, opened when they are first asked for."""

    def __missing__(self, path: Path) -> MappedFile:
        self[path] = found = MappedFile(path)
        return found


#: Largest pickle that is read, in bytes.
_LIMIT = 64 << 20
#: Longest directory of an archive that is read, in bytes: 90,000 records.
_DIRECTORY_LIMIT = 4 << 20
#: MS-DOS attribute of a folder, of which torch.load would return uninitialized memory.
_DIRECTORY = 0x10
#: Bytes in a local header before the name, and the two lengths at their end.
_HEADER, _LENGTHS = 30, struct.Struct("<HH")
#: Bytes in an entry of the directory before the name, and before the CRC32.
_ENTRY, _CRC32 = 46, 16


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """One record: name without the archive's folder, CRC32, bytes [offset, offset + size) of the file."""

    name: str
    crc: int
    offset: int
    size: int

    def check(self, file: MappedFile) -> None:
        """Compare the CRC32.

        Raises:
            ArchiveError: it is another than stored.
        """
        crc = 0
        for block in file.blocks(self.offset, self.size):
            crc = zlib.crc32(block, crc)
        if crc != self.crc:
            raise ArchiveError(
                f"record {self.name!r} (bytes {self.offset:,} to {self.offset + self.size:,}) has CRC32 "
                f"{crc:08x}, {self.crc:08x} was written: the file has changed since, so its contents are "
                "wrong: take them from another copy or checkpoint"
            )


class _Range(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, file: MappedFile, place: StoredObject) -> None:
        self._file, self._start, self._length, self._at = file, place.offset, place.length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise ArchiveError(f"the archive points to {self._at} bytes before its beginning")
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._length - self._at)
        size = rest if size is None or size < 0 else min(size, rest)
        if size > _DIRECTORY_LIMIT:
            raise ArchiveError(f"its directory has {size:,} bytes, at most {_DIRECTORY_LIMIT:,} are read")
        data = bytes(self._file(self._start + self._at, size))
        self._at += size
        return data


def records(file: MappedFile, place: StoredObject) -> list[ArchiveRecord]:
    """List the records of the archive at `place`, in file order."""
    try:
        with zipfile.ZipFile(_Range(file, place)) as archive:
            entries = sorted(archive.infolist(), key=lambda one: one.header_offset)
            comment, directory = archive.comment, archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OverflowError) as problem:
        raise ArchiveError(f"it is not an archive of torch.save ({problem})") from None
    if comment or not entries or entries[0].header_offset:
        raise ArchiveError("it does not begin or end like an archive of torch.save")
    found, reached = [], 0
    folder = entries[0].filename.partition("/")[0]
    for entry in entries:
        name = entry.filename
        if entry.compress_type or entry.compress_size != entry.file_size or entry.flag_bits & ~0x808:
            raise ArchiveError(f"record {name!r} is compressed or encrypted")
        if entry.external_attr & _DIRECTORY or name.partition("/")[0] != folder:
            raise ArchiveError(f"record {name!r} is a folder, or not in the folder {folder!r}")
        head = bytes(file(place.offset + entry.header_offset, _HEADER))
        named, extra = _LENGTHS.unpack(head[-_LENGTHS.size :])
        stored = bytes(file(place.offset + entry.header_offset + _HEADER, named))
        begin = entry.header_offset + _HEADER + named + extra
        if head[:4] != b"PK\3\4" or stored != entry.orig_filename.encode():
            raise ArchiveError(f"the header of record {name!r} is damaged")
        if entry.header_offset < reached or begin + entry.file_size > directory:
            raise ArchiveError(f"record {name!r} overlaps its neighbors")
        reached = begin + entry.file_size
        found.append(ArchiveRecord(name.partition("/")[2], entry.CRC, place.offset + begin, entry.file_size))
    if len({record.name for record in found}) != len(found):
        raise ArchiveError("two records have the same name")
    return found


def read_pickle(file: MappedFile, place: StoredObject) -> tuple[bytes, dict[str, ArchiveRecord]]:
    """Read the pickle of the archive at `place`. Also returns the records by name."""
    by_name = {record.name: record for record in records(file, place)}
    pickled, byteorder = by_name.get("data.pkl"), by_name.get("byteorder")
    if pickled is None or pickled.size > _LIMIT:
        raise ArchiveError(
            f"the archive at {place.offset:,} has no record 'data.pkl', or one of more than 64 MiB"
        )
    if pickled.crc:
        pickled.check(file)
    if byteorder and file(byteorder.offset, byteorder.size) != b"little":
        raise Refused(f"the archive at {place.offset:,} is not little-endian")
    return bytes(file(pickled.offset, pickled.size)), by_name


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor inside a file: element [i, j] at byte offset + (i * stride[0] + j * stride[1]) * item size."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    #: Contains the elements; its CRC32 is to be compared unless the archive has none.
    record: ArchiveRecord
    protected: bool = True

    @property
    def end(self) -> int:
        """The byte after the last element."""
        if 0 in self.shape:
            return self.offset
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride))
        return self.offset + (last + 1) * ITEM_SIZE[self.dtype]


class ChunkLayouts:
    """Finds the elements of chunks; only headers are read.

    Archives of equal tensors differ in their elements and CRC32s only. The first of them is parsed, the
    others are compared with it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, tuple[int, ...]], _Parsed] = {}

    def __call__(self, file: MappedFile, chunk: TensorChunk, dtype: str) -> TensorLayout:
        """Locate the elements of a chunk of a torch_dist tensor."""
        key = (chunk.length, dtype, chunk.sizes)
        if (first := self._known.get(key)) is not None and (found := first.alike(file, chunk)) is not None:
            return found
        layout = chunk_layout(file, chunk, dtype)
        if first is None:
            self._known[key] = _Parsed(file, chunk, layout)
        return layout


class _Parsed:
    """An archive that was parsed: all but its elements and CRC32s."""

    def __init__(self, file: MappedFile, chunk: TensorChunk, layout: TensorLayout) -> None:
        self.layout, self.start = layout, chunk.offset
        self.head = bytes(file(chunk.offset, layout.record.offset - chunk.offset))
        with zipfile.ZipFile(_Range(file, chunk)) as archive:
            self.directory, entries = archive.start_dir, archive.infolist()
        self.crcs, at = [], 0
        for entry in entries:
            self.crcs.append(at + _CRC32)
            if entry.filename.partition("/")[2] == layout.record.name:
                self.crc = at + _CRC32
            at += _ENTRY + len(entry.orig_filename.encode()) + len(entry.extra) + len(entry.comment)
        self.tail = self._without_crcs(self._tail_of(file, chunk))

    def _tail_of(self, file: MappedFile, chunk: TensorChunk) -> bytes:
        return bytes(file(chunk.offset + self.directory, chunk.length - self.directory))

    def _without_crcs(self, tail: bytes) -> bytearray:
        blank = bytearray(tail)
        for at in self.crcs:
            blank[at : at + 4] = bytes(4)
        return blank

    def alike(self, file: MappedFile, chunk: TensorChunk) -> TensorLayout | None:
        """The layout of a chunk whose archive differs from this one in its elements only."""
        tail = self._tail_of(file, chunk)
        if file(chunk.offset, len(self.head)) != self.head or self._without_crcs(tail) != self.tail:
            return None
        by, record = chunk.offset - self.start, self.layout.record
        crc = int.from_bytes(tail[self.crc : self.crc + 4], "little")
        moved = ArchiveRecord(record.name, crc, record.offset + by, record.size)
        protected = any(tail[at : at + 4] != bytes(4) for at in self.crcs)
        return replace(self.layout, offset=self.layout.offset + by, record=moved, protected=protected)


def chunk_layout(file: MappedFile, chunk: TensorChunk, dtype: str) -> TensorLayout:
    """Locate the elements of a chunk of a torch_dist tensor; only headers are read."""
    data, by_name = read_pickle(file, chunk)
    if "version" not in by_name:
        raise ArchiveError(f"the archive at {chunk.offset:,} has no record 'version'")
    tensor, what = _pickled_tensor(data), f"the tensor at {chunk.offset:,}"
    record = by_name.get(f"data/{tensor.storage}")
    if record is None:
        raise ArchiveError(f"{what} is in record 'data/{tensor.storage}', which is missing")
    begin = record.offset + tensor.begin * ITEM_SIZE[tensor.dtype]
    protected = any(one.crc for one in by_name.values())
    layout = TensorLayout(tensor.dtype, tensor.shape, tensor.stride, begin, record, protected)
    if layout.end > record.offset + record.size:
        raise ArchiveError(
            f"{what} needs {layout.end - record.offset:,} bytes of storage, record {record.name!r} has "
            f"{record.size:,}"
        )
    if (layout.dtype, layout.shape) != (dtype, chunk.sizes):
        raise ArchiveError(
            f"the chunk at {chunk.offset:,} holds {layout.dtype} of shape {list(layout.shape)}, "
            f"{INDEX} says {dtype} of shape {list(chunk.sizes)}"
        )
    return layout


@dataclass(frozen=True)
class _Storage:
    dtype: str | None
    key: str


@dataclass(frozen=True)
class _PickledTensor:
    """A tensor as its pickle describes it; `begin` counts elements of the storage."""

    dtype: str
    storage: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _storage_of(pid: Any) -> _Storage:
    """Map the persistent id of a storage to its type and key."""
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[2], str):
        raise Refused(f"it refers to a {type(pid).__name__} that is not a storage")
    return _Storage(pid[1] if isinstance(pid[1], str) else None, pid[2])


def _rebuilt_tensor(storage: Any, begin: Any, shape: Any, stride: Any, *rest: Any) -> _PickledTensor:
    """Take the arguments of torch._utils._rebuild_tensor_v2, or of v3, which ends with the dtype."""
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    if dtype is None and len(rest) >= 3:
        dtype = rest[2]
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) > MOST_AXES:
        raise Refused(f"its tensor has no shape and stride of at most {MOST_AXES} axes")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (begin, *shape, *stride)):
        raise Refused("its offset, shape or stride holds a value that is not a whole number from 0 to 2^62")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise Refused(f"its tensor has the unknown type {dtype!r:.40}" if dtype else "its tensor has no type")
    if len(shape) != len(stride) or math.prod(shape) >= 1 << 62:
        raise Refused(f"its tensor has shape {shape!r:.60} and stride {stride!r:.60}")
    return _PickledTensor(dtype, storage.key, begin, tuple(shape), tuple(stride))


STORAGES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
    **{"ComplexDouble": "complex128", "ComplexFloat": "complex64"},
}
#: Names in the pickle of one tensor.
_TENSOR_TABLE: dict[tuple[str, str], Any] = {
    **{("torch", dtype): dtype for dtype in ITEM_SIZE},
    **{("torch", f"{name}Storage"): dtype for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): None,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *rest: data,
    ("collections", "OrderedDict"): dict,
}


@lru_cache(maxsize=1024)
def _pickled_tensor(data: bytes) -> _PickledTensor:
    """Read the pickle of a chunk. The chunks of a checkpoint have few different ones."""
    tensor = Pickle(data, _TENSOR_TABLE, persistent=_storage_of).loaded()
    if not isinstance(tensor, _PickledTensor):
        raise Refused(f"it holds a {type(tensor).__name__}, not a tensor")
    return tensor
