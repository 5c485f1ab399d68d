"""CRC32s of records that are read in pieces.

torch.save stores a CRC32 with every record. A conversion reads most records whole, but in pieces, in any
order, and for several files that other processes write. The CRC32s of adjacent pieces combine to that of the
record, so nothing is read twice. Only bytes that nobody needed (padded rows of the vocabulary) are read for
the comparison alone.

safetensors files have no checksums: whatever their bytes are is converted.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.archive import BLOCK, ArchiveRecord, crc_mismatch, read_at
from megatron_nemotron3.checkpoints.convert.plan import Bits
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.checkpoints.read import opened

#: A record of a file below the folder of the source.
_Key = tuple[str, ArchiveRecord]
#: (first byte, one past the last) in the record -> CRC32.
_Pieces = dict[tuple[int, int], int]
#: Records that were not read whole, in plain lists: file, name, CRC32, offset, size, pieces.
Unfinished = list[list[Any]]


class Reads:
    """What was read of each record of a source with a CRC32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pieces: dict[_Key, _Pieces] = {}
        self._last: tuple[Bits, int] | None = None

    def add(self, path: Path, record: ArchiveRecord, offset: int, data: Bits) -> None:
        """Note that contiguous `data` was read from `offset` of the file; `record` contains it."""
        if not record.crc or not data.nbytes:  # written without CRC32s
            return
        crc = zlib.crc32(data.reshape(-1).view("u1"))
        begin = offset - record.offset
        key = (path.relative_to(self.folder).as_posix(), record)
        self._pieces.setdefault(key, {})[begin, begin + data.nbytes] = crc
        # While the array is kept, no other array can be at its address.
        self._last = (data, crc)

    def crc32(self, array: Bits) -> int:
        """Return the CRC32 of a contiguous array. It is known if the array is what was read last."""
        known = self.known(array)
        return zlib.crc32(array.reshape(-1).view("u1")) if known is None else known

    def known(self, array: Bits) -> int | None:
        """Return the CRC32 of an array if it is what was read last."""
        if self._last is None:
            return None
        last, crc = self._last
        return crc if array.ctypes.data == last.ctypes.data and array.nbytes == last.nbytes else None

    def take(self) -> Unfinished:
        """Compare the records that were read whole, and forget all. Returns the others, for `merge`."""
        pieces, self._pieces, self._last = self._pieces, {}, None
        rest: Unfinished = []
        for (name, record), some in pieces.items():
            chain = list(_chain(some, record.size))
            if all(crc is not None for _, _, crc in chain):
                self._compare(name, record, chain)
            else:
                known = [[begin, end, crc] for begin, end, crc in chain if crc is not None]
                rest.append([name, record.name, record.crc, record.offset, record.size, known])
        return rest

    def merge(self, rest: Unfinished, files: Sequence[str] | None = None) -> None:
        """Add what another process, or an interrupted job, returned from `take`."""
        for name, label, crc, offset, size, known in rest:
            numbers = [crc, offset, size, *(n for piece in known for n in piece)]
            if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
                raise ValueError(f"{rest!r:.80} does not describe pieces of records")
            if not isinstance(name, str) or not isinstance(label, str) or name not in (files or [name]):
                raise ValueError(f"{name!r:.80} is not a file of the source")
            pieces = self._pieces.setdefault((name, ArchiveRecord(label, crc, offset, size)), {})
            pieces |= {(begin, end): crc for begin, end, crc in known if begin < end <= size}

    def finish(self) -> None:
        """Read the rest of every record that was read in part, and compare."""
        for name, label, crc, offset, size, known in self.take():
            record = ArchiveRecord(label, crc, offset, size)
            whole = []
            with opened(self.folder / name) as descriptor:
                for begin, end, piece in _chain({(a, b): c for a, b, c in known}, size):
                    if piece is not None:
                        whole.append((begin, end, piece))
                        continue
                    for start in range(begin, end, BLOCK):
                        data = read_at(descriptor, offset + start, min(BLOCK, end - start))
                        whole.append((start, start + len(data), zlib.crc32(data)))
            self._compare(name, record, whole)

    def _compare(
        self, name: str, record: ArchiveRecord, pieces: Sequence[tuple[int, int, int | None]]
    ) -> None:
        crc = 0
        for begin, end, piece in pieces:
            assert piece is not None
            crc = combine_crc32(crc, piece, end - begin)
        if crc != record.crc:
            raise CheckpointError(
                f"{self.folder / name}: {crc_mismatch(record, crc)}: the file has changed since it was "
                "written, so weights are wrong: take them from another copy or checkpoint"
            )


class JoinedReads(Reads):
    """What was read of two sources; files of the second are named by their absolute paths."""

    def __init__(self, first: Reads, second: Reads) -> None:
        super().__init__(first.folder)
        self._parts = (first, second)

    def known(self, array: Bits) -> int | None:
        return next((crc for part in self._parts if (crc := part.known(array)) is not None), None)

    def take(self) -> Unfinished:
        first, second = self._parts
        home = second.folder.absolute()
        rest = [[os.path.join(home, name), *one] for name, *one in second.take()]
        return super().take() + first.take() + rest


def _chain(pieces: _Pieces, size: int) -> Iterator[tuple[int, int, int | None]]:
    """Cover [0, size) with (begin, end, CRC32); the CRC32 is None where no piece fits."""
    at, crc, begun = 0, 0, 0
    for begin, end in sorted(pieces):
        if begin < at:
            continue
        if begin > at:
            if at > begun:
                yield begun, at, crc
            yield at, begin, None
            begun = at = begin
            crc = 0
        crc, at = combine_crc32(crc, pieces[begin, end], end - begin), end
    if at > begun:
        yield begun, at, crc
    if at < size:
        yield at, size, None


_CRC_POLYNOMIAL = 0xEDB88320
_X0 = 1 << 31
_X8 = 1 << 23


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return zlib.crc32(a + b), given crc32(a), crc32(b) and the length of b in bytes.

    A CRC32 is a polynomial over GF(2), modulo that of IEEE 802.3. Appending n bytes multiplies it by x^(8n).
    Bit 31 of an integer is the coefficient of x^0, as in zlib.
    """
    return _gf2_product(_crc_shift(length), first) ^ second


@lru_cache(1 << 10)  # a checkpoint has few different lengths
def _crc_shift(length: int) -> int:
    """Return x^(8 length)."""
    result, square = _X0, _X8
    while length:
        if length & 1:
            result = _gf2_product(square, result)
        square = _gf2_product(square, square)
        length >>= 1
    return result


def _gf2_product(a: int, b: int) -> int:
    """Multiply two polynomials; `a` is not 0."""
    result, bit = 0, _X0
    while True:
        if a & bit:
            result ^= b
            if not a & (bit - 1):
                return result
        bit >>= 1
        b = (b >> 1) ^ _CRC_POLYNOMIAL if b & 1 else b >> 1
