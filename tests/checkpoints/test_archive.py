"""Damaged and hostile torch.save archives: refused, or the tensor is the one that was written."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_nemotron3.checkpoints.metadata import (
    ArchiveError,
    CheckpointError,
    CheckpointIndex,
    DistTensor,
    StoredObject,
    TensorChunk,
)
from megatron_nemotron3.checkpoints.pickles import Refused
from megatron_nemotron3.checkpoints.read import MappedFile, chunk_layout, records
from megatron_nemotron3.checkpoints.state import stored_object
from megatron_nemotron3.checkpoints.write import write_tensor
from tests.support import checkpoint_writer as writer
from tests.support.checkpoint_reading import read_rows

TENSOR = torch.arange(5, dtype=torch.bfloat16)


def saved() -> bytes:
    stream = io.BytesIO()
    torch.save(TENSOR, stream)
    return stream.getvalue()


def own() -> bytes:
    stream = io.BytesIO()
    write_tensor(stream, "bfloat16", (5,), [memoryview(TENSOR.view(torch.uint8).numpy())])
    return stream.getvalue()


def problem_of(file: MappedFile) -> str | None:
    """What a full check says."""
    chunk = TensorChunk("", 0, file.size, (0,), (5,))
    try:
        for record in records(file, chunk):
            record.check(file)
        chunk_layout(file, chunk, "bfloat16")
    except (ArchiveError, Refused) as problem:
        return str(problem)
    return None


def read(path: Path, begin: int = 0, length: int | None = None) -> torch.Tensor:
    """The tensor, by the converter's reader, from an archive at a place of a file."""
    length = path.stat().st_size if length is None else length
    chunk = TensorChunk(path.name, begin, length, (0,), (5,))
    return read_rows(CheckpointIndex(path.parent, {"w": DistTensor("bfloat16", (5,), (chunk,))}, {}), "w")


@pytest.mark.parametrize("make", [saved, own])
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.full)])
def test_each_flipped_bit_is_found_or_harmless(make: Callable[[], bytes], step: int, tmp_path: Path) -> None:
    raw, path = bytearray(make()), tmp_path / "archive"
    path.write_bytes(raw)
    file = MappedFile(path)
    assert problem_of(file) is None
    bits = set(range(0, 8 * len(raw), step))
    begin = raw.find(TENSOR.view(torch.uint8).numpy().tobytes())
    values = set(range(8 * begin, 8 * (begin + 10)))
    # The bit that marks an entry as a folder: torch.load then returns uninitialized memory.
    folder_bits = {8 * (at + 38) + 4 for at in range(len(raw)) if raw[at : at + 4] == b"PK\1\2"}
    found, unread = set(), set()
    with open(path, "r+b", buffering=0) as writable:
        for bit in sorted(bits | values | folder_bits):
            byte = raw[bit // 8] ^ 1 << bit % 8
            os.pwrite(writable.fileno(), bytes([byte]), bit // 8)
            if problem_of(file):
                found.add(bit)
            else:
                try:
                    loaded = torch.load(path, weights_only=True)
                except RuntimeError:  # torch reads fields that nothing depends on
                    unread.add(bit)
                else:
                    assert writer.same_bytes(loaded, TENSOR), bit
            try:
                assert writer.same_bytes(read(path), TENSOR), bit
            except CheckpointError as problem:
                assert bit in found and "\n" not in str(problem)
            os.pwrite(writable.fileno(), raw[bit // 8 : bit // 8 + 1], bit // 8)
    assert values | folder_bits <= found
    assert len(folder_bits) >= 4 and 0.3 < len(found) / len(bits) < 1
    assert len(unread) < 0.1 * len(bits)


@pytest.mark.parametrize("make", [saved, own])
def test_archives_that_are_cut(make: Callable[[], bytes], tmp_path: Path) -> None:
    raw, path = make(), tmp_path / "archive"
    for length in range(0, len(raw), 7):
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=f"{path}: "):
            read(path)
        with pytest.raises(CheckpointError, match=f"{path}: .*the file ends at byte {length:,}, inside"):
            read(path, 0, len(raw))


def test_torch_load_does_not_see_a_flipped_bit() -> None:
    """torch.load does not check CRC32s; `nemotron3 check --full` does."""
    tensor = torch.arange(1000.0)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    raw = bytearray(stream.getvalue())
    raw[raw.find(tensor.numpy().tobytes()) + 42] ^= 1
    assert not torch.equal(torch.load(io.BytesIO(raw), weights_only=True), tensor)


def test_large_archives_have_64_bit_offsets(tmp_path: Path) -> None:
    """A record beyond 4 GiB in a sparse file, whose 32-bit fields are all ones."""
    path = tmp_path / "large"
    with open(path, "w+b") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/version", b"3\n")
        # The header is far away; the bytes between belong to no record.
        file.seek(archive.start_dir + (5 << 30))
        archive.start_dir = file.tell()
        archive.writestr("archive/data/0", b"x" * 100)
    mapped = MappedFile(path)
    found = records(mapped, StoredObject("large", 0, mapped.size))
    assert [(r.name, r.size) for r in found] == [("version", 2), ("data/0", 100)]
    assert found[1].offset > 5 << 30
    for record in found:
        record.check(mapped)


# -- hostile archives ------------------------------------------------------------------------------------


def rebuilt(change: Callable[[str], str] = str, method: int = zipfile.ZIP_STORED, more: str = "") -> bytes:
    """The records of an archive under other names, compressed, or with one more."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(stream, "w", method) as new:
        for entry in old.infolist():
            if name := change(entry.filename):
                new.writestr(zipfile.ZipInfo(name), old.read(entry), method)
        if more:
            with pytest.warns(UserWarning) if more in new.namelist() else open(os.devnull):
                new.writestr(more, b"x" * 10)
    return stream.getvalue()


def _entry(raw: bytes, record: str) -> int:
    """Where a record's entry in the directory begins."""
    at = raw.rfind(b"archive/" + record.encode()) - 46
    assert raw[at : at + 4] == b"PK\1\2"
    return at


def put(raw: bytes, record: str, offset: int, form: str, *values: int) -> bytes:
    """Other numbers in a record's entry in the directory."""
    data = bytearray(raw)
    struct.pack_into(form, data, _entry(raw, record) + offset, *values)
    return bytes(data)


def overlapping() -> bytes:
    """Two entries of the directory for one record."""
    raw = saved()
    (header,) = struct.unpack_from("<L", raw, _entry(raw, "byteorder") + 42)
    return put(raw, "data/0", 42, "<L", header)


def zip64_lie() -> bytes:
    """A size of 64 bits that is far too large."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(stream, "w") as new:
        for entry in old.infolist():
            info = zipfile.ZipInfo(entry.filename)
            with new.open(info, "w") as file:
                file.write(old.read(entry))
            if entry.filename.endswith("data/0"):
                info.file_size = info.compress_size = 1 << 60
    return stream.getvalue()


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "compressed": (lambda: rebuilt(method=zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
    "encrypted": (lambda: put(saved(), "data/0", 8, "<H", 1), "is compressed or encrypted"),
    "method": (lambda: put(saved(), "data/0", 10, "<H", 99), "is compressed or encrypted|not an archive"),
    "two sizes": (lambda: put(saved(), "data/0", 20, "<L", 9), "is compressed or encrypted"),
    "larger": (lambda: put(saved(), "data/0", 20, "<LL", 10**9, 10**9), "overlaps its neighbors"),
    "far away": (lambda: put(saved(), "data/0", 42, "<L", 10**9), "the file ends at byte"),
    "overlapping": (overlapping, "is damaged|overlaps"),
    "folder": (lambda: put(saved(), "data/0", 38, "<L", 0x10), "is a folder"),
    "two folders": (lambda: rebuilt(more="other/data/0"), "not in the folder 'archive'"),
    "same name": (lambda: rebuilt(more="archive/data/0"), "two records have the same name"),
    "bytes in front": (lambda: b"x" * 64 + saved(), "does not begin or end"),
    "comment": (lambda: saved()[:-2] + b"\4\0abcd", "does not begin or end"),
    "two archives": (lambda: saved() + saved(), "does not begin or end"),
    "zip64 lie": (zip64_lie, "overlaps its neighbors"),
    "no pickle": (lambda: rebuilt(lambda n: n.replace("data.pkl", "data.txt")), "no record 'data.pkl'"),
    "no version": (lambda: rebuilt(lambda n: n * ("version" not in n)), "no record 'version'"),
    "no data": (lambda: rebuilt(lambda n: n * ("data/0" not in n)), "in record 'data/0', which is missing"),
    "nothing": (lambda: rebuilt(lambda n: ""), "not an archive of torch.save"),
    "no zip": (lambda: b"PK" * 500, "not an archive of torch.save"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives(kind: str, tmp_path: Path) -> None:
    make, message = HOSTILE[kind]
    path = tmp_path / "archive"
    path.write_bytes(make())
    with pytest.raises(CheckpointError, match=f"^{path}: .*({message})") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_numbers_that_are_big_endian(tmp_path: Path) -> None:
    stream, path = io.BytesIO(), tmp_path / "archive"
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(stream, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, b"big" if "byteorder" in entry.filename else old.read(entry))
    path.write_bytes(stream.getvalue())
    with pytest.raises(CheckpointError, match="not little-endian"):
        read(path)


@pytest.mark.parametrize("record", ["data.pkl", "directory"])
def test_sizes_that_would_fill_the_memory(record: str, tmp_path: Path) -> None:
    """A pickle, or a directory, of gigabytes in a sparse file is refused before it is read."""
    path, size = tmp_path / "archive", 3 << 30
    with open(path, "w+b") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/version", b"3\n")
        if record == "data.pkl":
            with archive.open("archive/data.pkl", "w", force_zip64=True) as made:
                made.write(b"x")
            entry = archive.getinfo("archive/data.pkl")
            entry.file_size = entry.compress_size = size
            file.seek(entry.header_offset + size + 100)
            archive.start_dir = file.tell()
    if record == "directory":
        data = path.read_bytes()
        end = bytearray(data[-22:])
        (begin,) = struct.unpack_from("<L", end, 16)
        struct.pack_into("<L", end, 12, size - begin)
        with open(path, "r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(end)
    with pytest.raises(CheckpointError, match="of more than 64 MiB|4,194,304"):
        stored_object(tmp_path, StoredObject("archive", 0, path.stat().st_size))
