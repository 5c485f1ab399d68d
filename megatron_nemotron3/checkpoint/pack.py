"""The archives torch.save writes, made without torch; a tensor's is known but for the values of its elements.

A torch_dist file is a row of such archives. Each is written strictly in order, so that data can stream:

    archive = tensor_archive("bfloat16", (4096, 2688))
    write(archive.head); write(data); write(archive.tail(zlib.crc32(data)))

The data's CRC32 stands behind the data and in the directory, both in the tail. Nothing else depends on
values or names: all experts share one archive. Data begins at a multiple of 64 bytes, and the archive's
length is one too, so that archives behind one another keep their data aligned.
"""

from __future__ import annotations

import io
import math
import pickle
import zlib
from argparse import Namespace
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_nemotron3.checkpoint.archive import (
    END,
    END64,
    ENTRY,
    FLAG_DESCRIPTOR,
    FLAG_UTF8,
    LOCAL,
    LOCATOR,
)
from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE
from megatron_nemotron3.checkpoint.read import STORAGES

#: As torch.save aligns storages.
ALIGNMENT = 64
_FOLDER = "archive/"
_LIMIT = 0xFFFFFFFF
_BYTEORDER, _VERSION = ("byteorder", b"little"), ("version", b"3\n")
#: Types that have a storage class of their own; the newer ones are stored as bytes and named beside them.
_CLASSES = {dtype: f"{name}Storage" for name, dtype in STORAGES.items()}


@dataclass(frozen=True)
class Archive:
    """The archive of one tensor: `head`, `data_length` bytes of little-endian elements, `tail(crc32)`."""

    head: bytes
    data_length: int
    #: Total, in bytes.
    length: int
    _behind: tuple[bytes, bytes, bytes]

    def tail(self, crc32: int) -> bytes:
        """What follows the data.

        Args:
            crc32: zlib.crc32 of the data.
        """
        crc = crc32.to_bytes(4, "little")
        first, middle, last = self._behind
        return first + crc + middle + crc + last


@lru_cache(maxsize=4096)
def tensor_archive(dtype: str, sizes: tuple[int, ...]) -> Archive:
    """The archive of a contiguous tensor, as torch.save writes it (file format 3, records stored).

    Args:
        dtype: torch's name without "torch.", one of `metadata.ITEM_SIZE`.
        sizes: shape; () for a scalar.

    Raises:
        ValueError: an unknown type or a negative size.
    """
    if dtype not in ITEM_SIZE or any(size < 0 for size in sizes):
        raise ValueError(f"no tensor can be {dtype!r} of shape {list(sizes)}")
    length = math.prod(sizes) * ITEM_SIZE[dtype]
    records = _Records()
    records.add("data.pkl", _tensor_pickle(dtype, sizes))
    records.add(*_BYTEORDER)
    records.open("data/0", length)
    head = records.take()
    records.at += length
    # The descriptor: signature, CRC32, the size twice, 8 bytes wide where the header was zip64.
    width = 8 if length >= _LIMIT else 4
    records.write(b"PK\7\10" + bytes(4) + length.to_bytes(width, "little") * 2)
    records.add(*_VERSION, end_aligned=True)
    body, directory, crc_at = records.take(), records.directory(), records.crc_in_directory("data/0")
    behind = (body[:4], body[8:] + directory[:crc_at], directory[crc_at + 4 :])
    return Archive(head, length, records.at + len(directory), behind)


def object_archive(value: Any) -> bytes:
    """torch.save of plain data: None, bool, int, float, str, and lists, tuples, dicts, Namespaces of these.

    Equal values give equal bytes. torch.load reads them with `weights_only=False`, and with True where
    `argparse.Namespace` is among the safe classes, as Megatron declares it.

    Raises:
        TypeError: something else is in it.
    """
    stream = io.BytesIO()
    pickler = _PlainPickler(stream, protocol=2)
    pickler.fast = True  # no memo: what is stored does not depend on which objects are identical
    pickler.dump(value)
    records = _Records()
    for name, data in (("data.pkl", stream.getvalue()), _BYTEORDER):
        records.add(name, data)
    records.add(*_VERSION, end_aligned=True)
    return records.take() + records.directory()


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if value is Namespace or type(value) is Namespace:
            return NotImplemented
        raise TypeError(f"{value!r:.60} is a {type(value).__name__}; only plain data is stored")


def _tensor_pickle(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """torch._utils._rebuild_tensor_v2(storage, 0, sizes, stride, False, OrderedDict()); v3 names the type."""
    if dtype in _CLASSES:
        version, storage, count = b"2", b"ctorch\n" + _CLASSES[dtype].encode() + b"\n", math.prod(sizes)
        ending = b""
    else:
        version, storage = b"3", b"ctorch.storage\nUntypedStorage\n"
        count, ending = math.prod(sizes) * ITEM_SIZE[dtype], b"ctorch\n" + dtype.encode() + b"\n"
    stride, step = [], 1
    for size in reversed(sizes):
        stride.append(step)
        step *= max(size, 1)
    return b"".join(
        (
            pickle.PROTO + b"\2ctorch._utils\n_rebuild_tensor_v" + version + b"\n(",
            b"(" + _string("storage") + storage + _string("0") + _string("cpu") + _int(count),
            pickle.TUPLE + pickle.BINPERSID + _int(0),
            pickle.MARK + b"".join(map(_int, sizes)) + pickle.TUPLE,
            pickle.MARK + b"".join(map(_int, reversed(stride))) + pickle.TUPLE,
            pickle.NEWFALSE + b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE,
            ending + pickle.TUPLE + pickle.REDUCE + pickle.STOP,
        )
    )


def _string(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data


def _int(number: int) -> bytes:
    """A number that is not negative."""
    if number < 1 << 8:
        return pickle.BININT1 + number.to_bytes(1, "little")
    if number < 1 << 31:
        return pickle.BININT + number.to_bytes(4, "little")
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return pickle.LONG1 + bytes([len(data)]) + data


class _Records:
    """Builds an archive in order: records, then the directory."""

    def __init__(self) -> None:
        #: Bytes so far, those taken included.
        self.at = 0
        self._parts: list[bytes] = []
        #: (full name, flags, CRC32, size, where the local header is)
        self._entries: list[tuple[bytes, int, int, int, int]] = []

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        self.at += len(data)

    def take(self) -> bytes:
        """The bytes since the last call."""
        data = b"".join(self._parts)
        self._parts = []
        return data

    def add(self, name: str, data: bytes, *, end_aligned: bool = False) -> None:
        """A whole record. With `end_aligned` it is the last, and the archive ends at a multiple of 64."""
        header, crc = self.at, zlib.crc32(data)
        full = self._entry(name, FLAG_UTF8, crc, len(data), header)
        padding = b""
        if end_aligned:
            end = header + LOCAL.size + len(full) + len(data) + len(self.directory())
            padding = _padding(-end)
        self.write(_local(full, FLAG_UTF8, crc, len(data), padding) + data)

    def open(self, name: str, size: int) -> None:
        """The header of a record whose data comes later; the data begins at a multiple of 64."""
        flags = FLAG_UTF8 | FLAG_DESCRIPTOR
        full = self._entry(name, flags, 0, size, self.at)
        large = size >= _LIMIT
        # A descriptor gives the size, so the header does not; zip64 must still be announced.
        extra = _zip64(size, size) if large else b""
        data = self.at + LOCAL.size + len(full) + len(extra)
        self.write(_local(full, flags, 0, _LIMIT if large else 0, extra + _padding(-data)))

    def _entry(self, name: str, flags: int, crc: int, size: int, header: int) -> bytes:
        full = (_FOLDER + name).encode()
        self._entries.append((full, flags, crc, size, header))
        return full

    def crc_in_directory(self, name: str) -> int:
        """Where an entry's CRC32 is, counted from the directory's begin."""
        at = 0
        for entry in self._entries:
            if entry[0] == (_FOLDER + name).encode():
                return at + 16
            at += len(_central(*entry))
        raise KeyError(name)

    def directory(self) -> bytes:
        """The directory and both ends, as they must be if they follow here."""
        entries = b"".join(_central(*entry) for entry in self._entries)
        count, size, start = len(self._entries), len(entries), self.at
        rest = END64.size - 12
        end64 = END64.pack(b"PK\6\6", rest, 45, 45, 0, 0, count, count, size, start)
        locator = LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        end = END.pack(b"PK\5\6", 0, 0, count, count, size, min(start, _LIMIT), 0)
        return entries + end64 + locator + end


def _local(name: bytes, flags: int, crc: int, size: int, extra: bytes) -> bytes:
    version = 45 if size >= _LIMIT else 10
    return (
        LOCAL.pack(b"PK\3\4", version, flags, 0, 0, 0, crc, size, size, len(name), len(extra)) + name + extra
    )


def _central(name: bytes, flags: int, crc: int, size: int, header: int) -> bytes:
    large = [size] * 2 * (size >= _LIMIT) + [header] * (header >= _LIMIT)
    extra = _zip64(*large) if large else b""
    version, size, header = 45 if large else 10, min(size, _LIMIT), min(header, _LIMIT)
    fixed = (b"PK\1\2", version, 0, version, flags, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0)
    return ENTRY.pack(*fixed, 0, header) + name + extra


def _zip64(*numbers: int) -> bytes:
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    return b"\1\0" + len(data).to_bytes(2, "little") + data


def _padding(at_least: int) -> bytes:
    """An extra field of `at_least` bytes modulo 64, of the kind torch pads with; it cannot have 1, 2 or 3."""
    size = at_least % ALIGNMENT
    size += ALIGNMENT * (0 < size < 4)
    return b"FB" + (size - 4).to_bytes(2, "little") + bytes(size - 4) if size else b""
