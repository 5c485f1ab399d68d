"""Files are written as streams: while one block is written, the next is prepared and checksummed."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.convert import streams
from megatron_nemotron3.checkpoints.convert.checksums import combine_crc32
from megatron_nemotron3.checkpoints.convert.plan import Slices, whole
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, Part, blocks, write
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from tests.support.counted_job import Numbers


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksum_of_two_byte_strings(a: bytes, b: bytes) -> None:
    assert combine_crc32(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**33), max_size=4))
def test_checksums_are_put_together_in_any_order(crc: int, lengths: list[int]) -> None:
    """Combining CRC32s is associative; lengths up to 8 GB, without making the bytes."""
    left, right, behind = crc, 0, 0
    for length in lengths:
        left = combine_crc32(left, 7, length)
    for length in reversed(lengths):
        right = combine_crc32(7, right, behind)
        behind += length
    assert left == combine_crc32(crc, right, behind)


def plan() -> FilePlan:
    def tail(crc: int) -> bytes:
        return crc.to_bytes(4, "big")

    parts = [Part(b"head")]
    parts += [Part(b"<" * i, f"t{i}", whole((40, 8)), "uint8", tail, 4) for i in range(6)]
    parts += [Part(tensor="t1", slices=((3, 9), (0, 8)), dtype="uint8"), Part(b"end")]
    return FilePlan("file", parts)


@pytest.mark.parametrize("size", [8, 24, 100, 1 << 20])
def test_file_and_its_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(streams, "BAND", size)
    monkeypatch.setattr(streams, "_WRITE", 17)
    source, counted = Numbers(tmp_path), []
    crc = write(plan(), source, tmp_path / "file", counted.append)
    expected = b"head"
    for i in range(6):
        data = source.read(f"t{i}", whole((40, 8))).tobytes()
        expected += b"<" * i + data + zlib.crc32(data).to_bytes(4, "big")
    expected += source.read("t1", ((3, 9), (0, 8))).tobytes() + b"end"
    assert (
        (tmp_path / "file").read_bytes() == expected == b"".join(block for block, _ in blocks(plan(), source))
    )
    assert crc == zlib.crc32(expected) and sum(counted) == len(expected) == plan().length


def test_few_blocks_are_made_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded even if the disk is slow."""
    monkeypatch.setattr(streams, "BAND", 8)
    made: list[int] = []
    source = Numbers(tmp_path)
    read = source.read

    def counting(name: str, slices: Slices) -> numpy.ndarray:
        made.append(1)
        return read(name, slices)

    monkeypatch.setattr(source, "read", counting)
    written = 0

    def look(length: int) -> None:
        nonlocal written
        written += 1
        assert len(made) <= written + streams._AHEAD

    write(plan(), source, tmp_path / "file", look)
    assert len(made) == 6 * 40 + 6


def test_what_goes_wrong_ahead_ends_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Numbers(tmp_path)
    read = source.read

    def damaged(name: str, slices: Slices) -> numpy.ndarray:
        if name == "t3":
            raise CheckpointError("t3 is damaged")
        return read(name, slices)

    monkeypatch.setattr(source, "read", damaged)
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="t3 is damaged"):
        write(plan(), source, tmp_path / "file", lambda length: None)
    assert not (tmp_path / "file").exists() and threading.active_count() == before


def test_a_full_disk_ends_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(length: int) -> None:
        raise OSError("disk full")

    before = threading.active_count()
    with pytest.raises(OSError, match="disk full"):
        write(plan(), Numbers(tmp_path), tmp_path / "file", full)
    assert threading.active_count() == before
