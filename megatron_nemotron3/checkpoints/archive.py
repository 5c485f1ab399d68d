"""The zip archives of torch.save: find their records, check their CRC32, and write them.

A torch_dist chunk is such an archive inside a .distcp file; common.pt is a single archive.
Records are never compressed, so the data of a record is a plain range of the file:

    [local header, name, padding, data, CRC32] per record ‖ directory ‖ zip64 end, its locator ‖ end

torch.load does not check the CRC32s: a flipped bit in the data loads as another number.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: Bytes read per call.
BLOCK = 1 << 20
LOCAL = struct.Struct("<4sHHHHHLLLHH")
ENTRY = struct.Struct("<4sBBHHHHHLLLHHHHHLL")
END = struct.Struct("<4sHHHHLLH")
LOCATOR = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQHHLLQQQQ")
FLAG_DESCRIPTOR, FLAG_UTF8 = 0x08, 0x800
#: torch.save aligns the data of storages to this many bytes.
ALIGNMENT = 64
#: Sizes and offsets from here on are stored as 64-bit numbers in an extra field.
ZIP64_LIMIT = 0xFFFFFFFF
_FOLDER = "archive/"
#: MS-DOS attribute of a folder.
_DIRECTORY = 0x10


class ArchiveError(ValueError):
    """The bytes are not a valid torch.save archive. The message does not name the file."""


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """One record: name without the archive's folder, CRC32, bytes [offset, offset + size) of the file."""

    name: str
    crc: int
    offset: int
    size: int


#: (device, inode) of a placeholder of a remote file (`remote`) -> what reads the file.
REMOTE: dict[tuple[int, int], Callable[[memoryview, int], int]] = {}


def preadv(descriptor: int, view: memoryview, offset: int) -> int:
    """Read from `offset` into `view`. Returns the number of bytes, 0 at the end of the file."""
    if REMOTE:
        found = os.fstat(descriptor)
        if (read := REMOTE.get((found.st_dev, found.st_ino))) is not None:
            return read(view, offset)
    return os.preadv(descriptor, [view], offset)


def read_at(descriptor: int, offset: int, length: int) -> bytearray:
    """Read `length` bytes from `offset`."""
    if offset + length > (end := os.fstat(descriptor).st_size):  # before memory is allocated
        raise ArchiveError(f"the file ends at byte {end:,}, inside the {length:,} from {offset:,}")
    data = bytearray(length)
    read_into(descriptor, memoryview(data), offset)
    return data


def read_into(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes from `offset`."""
    done, length = 0, len(view)
    while done < length:
        count = preadv(descriptor, view[done : done + (1 << 30)], offset + done)
        if count == 0:
            raise ArchiveError(
                f"the file ends at byte {offset + done:,}, inside the {length:,} from {offset:,}"
            )
        done += count


def records(descriptor: int, start: int, length: int) -> list[ArchiveRecord]:
    """List the records of the archive at bytes [start, start + length), in file order."""
    directory, count = _directory(descriptor, start, length)
    found: list[ArchiveRecord] = []
    at, reached, folder = 0, 0, None
    for _ in range(count):
        entry, name, at = _directory_entry(directory, at)
        folder_here, _, short = name.partition("/")
        if folder not in (None, folder_here):
            raise ArchiveError(f"record {name!r} is not in the folder {folder!r}")
        folder = folder_here
        data = _data_offset(descriptor, start, length, entry, name)
        if entry.header < reached or data + entry.size > length - len(directory):
            raise ArchiveError(f"record {name!r} overlaps its neighbors")
        reached = data + entry.size
        found.append(ArchiveRecord(short, entry.crc, start + data, entry.size))
    if at != len(directory):
        raise ArchiveError(f"the directory has {len(directory) - at} bytes after its {count} entries")
    if len({record.name for record in found}) != len(found):
        raise ArchiveError("two records have the same name")
    return found


def crc_problem(descriptor: int, record: ArchiveRecord) -> str | None:
    """Check the CRC32 of a record block by block. Return None if it is right, else a message."""
    crc, done = 0, 0
    block = bytearray(min(BLOCK, record.size))
    while done < record.size:
        view = memoryview(block)[: record.size - done]
        count = preadv(descriptor, view, record.offset + done)
        if count == 0:
            raise ArchiveError(f"the file ends inside record {record.name!r}")
        crc, done = zlib.crc32(view[:count], crc), done + count
    return None if crc == record.crc else crc_mismatch(record, crc)


def crc_mismatch(record: ArchiveRecord, crc: int) -> str:
    """Say that a record has the CRC32 `crc` instead of the stored one."""
    end = record.offset + record.size
    return (
        f"record {record.name!r} (bytes {record.offset:,} to {end:,}) has CRC32 {crc:08x}, "
        f"{record.crc:08x} was written"
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    flags: int
    crc: int
    size: int
    header: int


def _directory(descriptor: int, start: int, length: int) -> tuple[bytes, int]:
    """Return the bytes of the central directory and the number of its entries."""
    tail_length = min(length, END.size + LOCATOR.size + END64.size)
    if tail_length < END.size:
        raise ArchiveError(f"{length} bytes are too few for a torch.save archive")
    tail = bytes(read_at(descriptor, start + length - tail_length, tail_length))
    end = END.unpack_from(tail, len(tail) - END.size)
    if end[0] != b"PK\5\6":
        raise ArchiveError("it does not end like a torch.save archive")
    _, disk, directory_disk, here, count, size, offset, comment = end
    end_size = END.size
    locator_at = len(tail) - END.size - LOCATOR.size
    end64_at = locator_at - END64.size
    if end64_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\6\7":
        _, _, end64_offset, disks = LOCATOR.unpack_from(tail, locator_at)
        if tail[end64_at : end64_at + 4] != b"PK\6\6" or disks != 1:
            raise ArchiveError("its zip64 end is damaged")
        if end64_offset != length - (len(tail) - end64_at):
            raise ArchiveError(f"its zip64 locator gives the wrong offset {end64_offset:,}")
        _, rest, _, _, disk, directory_disk, here, count, size, offset = END64.unpack_from(tail, end64_at)
        if rest != END64.size - 12 or not _ends_agree(end[3:7], (here, count, size, offset)):
            raise ArchiveError("its two ends disagree")
        end_size = len(tail) - end64_at
    if disk or directory_disk or comment or here != count:
        raise ArchiveError("its end record is damaged")
    if offset + size + end_size != length:
        raise ArchiveError(f"its directory of {size:,} bytes at {offset:,} does not end where the end begins")
    return bytes(read_at(descriptor, start + offset, size)), count


def _ends_agree(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether each field of the 32-bit end has the same value, or all ones if the value is too large."""
    limits = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    return all(a in (b, limit) for a, b, limit in zip(old, new, limits))


def _directory_entry(directory: bytes, at: int) -> tuple[_Entry, str, int]:
    """Parse the entry at byte `at`: the entry, its full name, and the start of the next entry."""
    if at + ENTRY.size > len(directory):
        raise ArchiveError("its directory ends inside an entry")
    fields = ENTRY.unpack_from(directory, at)
    signature, _, _, _, flags, method, _, _, crc, stored, size, name_n, extra_n, comment_n, disk = fields[:15]
    attributes, header = fields[16:]
    if attributes & _DIRECTORY:  # torch.load would return uninitialized memory
        raise ArchiveError(f"the directory entry at byte {at} is marked as a folder")
    name_at = at + ENTRY.size
    end = name_at + name_n + extra_n + comment_n
    if signature != b"PK\1\2" or end > len(directory) or comment_n:
        raise ArchiveError(f"its directory is damaged at byte {at}")
    name = directory[name_at : name_at + name_n].decode("utf-8", "replace")
    extra = directory[name_at + name_n : end]
    large = _zip64_numbers(extra)
    size = next(large, -1) if size == 0xFFFFFFFF else size
    stored = next(large, -1) if stored == 0xFFFFFFFF else stored
    header = next(large, -1) if header == 0xFFFFFFFF else header
    if method or stored != size or size < 0 or header < 0 or disk or flags & ~(FLAG_DESCRIPTOR | FLAG_UTF8):
        raise ArchiveError(f"record {name!r} is compressed or encrypted (method {method}, flags {flags:#x})")
    return _Entry(flags, crc, size, header), name, end


def _zip64_numbers(extra: bytes) -> Iterator[int]:
    """Yield the 64-bit numbers of an extra field; they replace the 32-bit fields that are all ones."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            for place in range(at + 4, min(at + 4 + size, len(extra)) - 7, 8):
                yield struct.unpack_from("<Q", extra, place)[0]
        at += 4 + size


def _data_offset(descriptor: int, start: int, length: int, entry: _Entry, name: str) -> int:
    """Return the offset of a record's data in the archive; check its local header against the directory."""
    encoded = name.encode()
    if entry.header + LOCAL.size + len(encoded) > length:
        raise ArchiveError(f"record {name!r} begins at {entry.header:,}, after the end of the archive")
    head = bytes(read_at(descriptor, start + entry.header, LOCAL.size + len(encoded)))
    signature, _, flags, method, _, _, crc, stored, size, name_n, extra_n = LOCAL.unpack_from(head)
    if signature != b"PK\3\4" or flags != entry.flags or method or head[LOCAL.size :] != encoded:
        raise ArchiveError(f"the header of record {name!r} is damaged")
    if name_n != len(encoded):
        raise ArchiveError(f"the header of record {name!r} gives {name_n} bytes of name, not {len(encoded)}")
    # 0 if a descriptor follows the data; otherwise the same numbers as in the directory.
    if crc not in (0, entry.crc) or not {stored, size} <= {0, entry.size, 0xFFFFFFFF}:
        raise ArchiveError(f"the header of record {name!r} and the directory disagree")
    return entry.header + LOCAL.size + name_n + extra_n


class ArchiveWriter:
    """Build an archive in order: records, then the directory."""

    def __init__(self) -> None:
        #: Bytes written so far, including those that were taken.
        self.at = 0
        self._parts: list[bytes] = []
        #: (full name, flags, CRC32, size, offset of the local header)
        self._entries: list[tuple[bytes, int, int, int, int]] = []

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        self.at += len(data)

    def take(self) -> bytes:
        """Return the bytes written since the last call."""
        data = b"".join(self._parts)
        self._parts = []
        return data

    def add(self, name: str, data: bytes, *, end_aligned: bool = False) -> None:
        """Write a whole record. `end_aligned`: it is the last, and the archive ends at a multiple of 64."""
        header, crc = self.at, zlib.crc32(data)
        full = self._add_entry(name, FLAG_UTF8, crc, len(data), header)
        padding = b""
        if end_aligned:
            end = header + LOCAL.size + len(full) + len(data) + len(self.directory())
            padding = _padding_field(-end)
        self.write(_local_header(full, FLAG_UTF8, crc, len(data), padding) + data)

    def open(self, name: str, size: int) -> None:
        """Write the header of a record whose data comes later; the data begins at a multiple of 64."""
        flags = FLAG_UTF8 | FLAG_DESCRIPTOR
        full = self._add_entry(name, flags, 0, size, self.at)
        large = size >= ZIP64_LIMIT
        # The descriptor has the size, so the header does not need it, but it must announce zip64.
        extra = _zip64_field(size, size) if large else b""
        data = self.at + LOCAL.size + len(full) + len(extra)
        self.write(_local_header(full, flags, 0, ZIP64_LIMIT if large else 0, extra + _padding_field(-data)))

    def _add_entry(self, name: str, flags: int, crc: int, size: int, header: int) -> bytes:
        full = (_FOLDER + name).encode()
        self._entries.append((full, flags, crc, size, header))
        return full

    def crc_in_directory(self, name: str) -> int:
        """Offset of an entry's CRC32 in the directory."""
        at = 0
        for entry in self._entries:
            if entry[0] == (_FOLDER + name).encode():
                return at + 16
            at += len(_central_entry(*entry))
        raise KeyError(name)

    def directory(self) -> bytes:
        """Return the directory and both end records, to be written at the current offset."""
        entries = b"".join(_central_entry(*entry) for entry in self._entries)
        count, size, start = len(self._entries), len(entries), self.at
        rest = END64.size - 12
        end64 = END64.pack(b"PK\6\6", rest, 45, 45, 0, 0, count, count, size, start)
        locator = LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        end = END.pack(b"PK\5\6", 0, 0, count, count, size, min(start, ZIP64_LIMIT), 0)
        return entries + end64 + locator + end


def _local_header(name: bytes, flags: int, crc: int, size: int, extra: bytes) -> bytes:
    version = 45 if size >= ZIP64_LIMIT else 10
    return (
        LOCAL.pack(b"PK\3\4", version, flags, 0, 0, 0, crc, size, size, len(name), len(extra)) + name + extra
    )


def _central_entry(name: bytes, flags: int, crc: int, size: int, header: int) -> bytes:
    large = [size] * 2 * (size >= ZIP64_LIMIT) + [header] * (header >= ZIP64_LIMIT)
    extra = _zip64_field(*large) if large else b""
    version, size, header = 45 if large else 10, min(size, ZIP64_LIMIT), min(header, ZIP64_LIMIT)
    fixed = (b"PK\1\2", version, 0, version, flags, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0)
    return ENTRY.pack(*fixed, 0, header) + name + extra


def _zip64_field(*numbers: int) -> bytes:
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    return b"\1\0" + len(data).to_bytes(2, "little") + data


def _padding_field(at_least: int) -> bytes:
    """Return an extra field of `at_least` bytes modulo 64, of torch's kind; 1 to 3 bytes are impossible."""
    size = at_least % ALIGNMENT
    size += ALIGNMENT * (0 < size < 4)
    return b"FB" + (size - 4).to_bytes(2, "little") + bytes(size - 4) if size else b""
