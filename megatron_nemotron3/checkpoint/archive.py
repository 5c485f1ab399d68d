"""The zip archive that torch.save writes: its records, where their bytes are, and their CRC32.

A torch_dist chunk is such an archive somewhere inside a .distcp file, a legacy checkpoint is one as a
whole. Records are stored, never compressed, so a record's data is a plain range of the file:

    [local header, name, padding, data, CRC32] per record ‖ directory ‖ zip64 end, its locator ‖ end

torch.load does not look at the CRC32s: a flipped bit in the data loads as another number.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

#: Bytes read at once.
BLOCK = 1 << 20
LOCAL = struct.Struct("<4sHHHHHLLLHH")
ENTRY = struct.Struct("<4sBBHHHHHLLLHHHHHLL")
END = struct.Struct("<4sHHHHLLH")
LOCATOR = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQHHLLQQQQ")
FLAG_DESCRIPTOR, FLAG_UTF8 = 0x08, 0x800
#: MS-DOS attribute of an entry.
_DIRECTORY = 0x10


class ArchiveError(ValueError):
    """The bytes are no sound torch.save archive; the message says what is wrong, not where the file is."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record: name without the archive's folder, CRC32, bytes [offset, offset + size) of the file."""

    name: str
    crc: int
    offset: int
    size: int


def read_at(descriptor: int, offset: int, length: int) -> bytearray:
    """`length` bytes from `offset`.

    Raises:
        ArchiveError: the file ends before.
    """
    if offset + length > (end := os.fstat(descriptor).st_size):  # before there is memory for it
        raise ArchiveError(f"the file ends at byte {end:,}, inside the {length:,} from {offset:,}")
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
        if count == 0:
            raise ArchiveError(
                f"the file ends at byte {offset + done:,}, inside the {length:,} from {offset:,}"
            )
        done += count
    return data


def records(descriptor: int, start: int, length: int) -> list[Record]:
    """The records of the archive at bytes [start, start + length), in file order.

    Raises:
        ArchiveError: it is not a sound archive of stored records.
    """
    directory, count = _directory(descriptor, start, length)
    found: list[Record] = []
    at, reached, folder = 0, 0, None
    for _ in range(count):
        entry, name, at = _entry(directory, at)
        folder_here, _, short = name.partition("/")
        if folder not in (None, folder_here):
            raise ArchiveError(f"record {name!r} is not in the folder {folder!r}")
        folder = folder_here
        data = _data_offset(descriptor, start, length, entry, name)
        if entry.header < reached or data + entry.size > length - len(directory):
            raise ArchiveError(f"record {name!r} overlaps its neighbors")
        reached = data + entry.size
        found.append(Record(short, entry.crc, start + data, entry.size))
    if at != len(directory):
        raise ArchiveError(f"the directory has {len(directory) - at} bytes behind its {count} entries")
    if len({record.name for record in found}) != len(found):
        raise ArchiveError("two records have the same name")
    return found


def crc_problem(descriptor: int, record: Record) -> str | None:
    """None if the record's bytes have its CRC32; reads block by block.

    Raises:
        ArchiveError: the file ends before the record does.
    """
    crc, done = 0, 0
    block = bytearray(min(BLOCK, record.size))
    while done < record.size:
        view = memoryview(block)[: record.size - done]
        count = os.preadv(descriptor, [view], record.offset + done)
        if count == 0:
            raise ArchiveError(f"the file ends inside record {record.name!r}")
        crc, done = zlib.crc32(view[:count], crc), done + count
    if crc == record.crc:
        return None
    end = record.offset + record.size
    return (
        f"record {record.name!r} (bytes {record.offset:,} to {end:,}) has CRC32 {crc:08x}, "
        f"{record.crc:08x} was written"
    )


def without_crc(found: list[Record]) -> bool:
    """Whether the archive was written with torch.serialization.set_crc32_options(False): all CRC32s are 0."""
    return all(record.crc == 0 for record in found)


@dataclass(frozen=True, slots=True)
class _Entry:
    flags: int
    crc: int
    size: int
    header: int


def _directory(descriptor: int, start: int, length: int) -> tuple[bytes, int]:
    """(bytes of the directory, number of its entries)."""
    tail_length = min(length, END.size + LOCATOR.size + END64.size)
    if tail_length < END.size:
        raise ArchiveError(f"{length} bytes are too few for a torch.save archive")
    tail = bytes(read_at(descriptor, start + length - tail_length, tail_length))
    end = END.unpack_from(tail, len(tail) - END.size)
    if end[0] != b"PK\5\6":
        raise ArchiveError("it does not end like a torch.save archive")
    _, disk, directory_disk, here, count, size, offset, comment = end
    behind = END.size
    locator_at = len(tail) - END.size - LOCATOR.size
    end64_at = locator_at - END64.size
    if end64_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\6\7":
        _, _, end64_offset, disks = LOCATOR.unpack_from(tail, locator_at)
        if tail[end64_at : end64_at + 4] != b"PK\6\6" or disks != 1:
            raise ArchiveError("its zip64 end is damaged")
        if end64_offset != length - (len(tail) - end64_at):
            raise ArchiveError(f"its zip64 end is said to be at {end64_offset:,}")
        _, rest, _, _, disk, directory_disk, here, count, size, offset = END64.unpack_from(tail, end64_at)
        if rest != END64.size - 12 or not _agree(end[3:7], (here, count, size, offset)):
            raise ArchiveError("its two ends disagree")
        behind = len(tail) - end64_at
    if disk or directory_disk or comment or here != count:
        raise ArchiveError("its end record is damaged")
    if offset + size + behind != length:
        raise ArchiveError(f"its directory of {size:,} bytes at {offset:,} does not end where the end begins")
    return bytes(read_at(descriptor, start + offset, size)), count


def _agree(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """A field of the 32-bit end holds the same number, or all ones if that is too large for it."""
    limits = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    return all(a in (b, limit) for a, b, limit in zip(old, new, limits))


def _entry(directory: bytes, at: int) -> tuple[_Entry, str, int]:
    """(entry, its full name, where the next entry begins)."""
    if at + ENTRY.size > len(directory):
        raise ArchiveError("its directory ends inside an entry")
    fields = ENTRY.unpack_from(directory, at)
    signature, _, _, _, flags, method, _, _, crc, stored, size, name_n, extra_n, comment_n, disk = fields[:15]
    attributes, header = fields[16:]
    if attributes & _DIRECTORY:  # torch.load then reads no data and returns what the memory held
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
        raise ArchiveError(f"record {name!r} is not plainly stored (method {method}, flags {flags:#x})")
    return _Entry(flags, crc, size, header), name, end


def _zip64_numbers(extra: bytes) -> Iterator[int]:
    """The 64-bit numbers of an entry's extra field, which stand in for those that read all ones."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            for place in range(at + 4, min(at + 4 + size, len(extra)) - 7, 8):
                yield struct.unpack_from("<Q", extra, place)[0]
        at += 4 + size


def _data_offset(descriptor: int, start: int, length: int, entry: _Entry, name: str) -> int:
    """Where a record's data begins, counted from the archive; its local header must tell the same."""
    encoded = name.encode()
    if entry.header + LOCAL.size + len(encoded) > length:
        raise ArchiveError(f"record {name!r} begins at {entry.header:,}, behind the archive's end")
    head = bytes(read_at(descriptor, start + entry.header, LOCAL.size + len(encoded)))
    signature, _, flags, method, _, _, crc, stored, size, name_n, extra_n = LOCAL.unpack_from(head)
    if signature != b"PK\3\4" or flags != entry.flags or method or head[LOCAL.size :] != encoded:
        raise ArchiveError(f"the header of record {name!r} is damaged")
    if name_n != len(encoded):
        raise ArchiveError(f"the header of record {name!r} gives {name_n} bytes of name, not {len(encoded)}")
    # With a descriptor behind the data these are 0; in any case nothing else than the directory's.
    if crc not in (0, entry.crc) or not {stored, size} <= {0, entry.size, 0xFFFFFFFF}:
        raise ArchiveError(f"the header of record {name!r} and the directory disagree")
    return entry.header + LOCAL.size + name_n + extra_n
