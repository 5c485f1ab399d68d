"""Archives and the index of torch_dist folders: ours are read by torch, and damaged ones are refused."""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_nemotron3.checkpoints.convert.streams import OutputFile
from megatron_nemotron3.checkpoints.metadata import (
    ITEM_SIZE,
    ArchiveError,
    CheckpointError,
    CheckpointIndex,
    DistTensor,
    StoredObject,
    TensorChunk,
    read_metadata,
)
from megatron_nemotron3.checkpoints.pickles import Refused
from megatron_nemotron3.checkpoints.read import MappedFile, chunk_layout, records
from megatron_nemotron3.checkpoints.state import stored_object
from megatron_nemotron3.checkpoints.write import (
    COMMON_OBJECT,
    CONFIG_TEXT,
    object_archive,
    overhead,
    write_tensor,
)
from tests.support import checkpoint_writer as writer
from tests.support.checkpoint_reading import read_rows
from tests.support.checkpoint_writer import index_bytes, tensors, write

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


def rebuilt(
    change: Callable[[str], str] = str,
    method: int = zipfile.ZIP_STORED,
    more: str = "",
    order: bytes = b"little",
) -> bytes:
    """The records of an archive under other names, compressed, in another byte order, or with one more."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(stream, "w", method) as new:
        for entry in old.infolist():
            if name := change(entry.filename):
                data = order if name.endswith("byteorder") else old.read(entry)
                new.writestr(zipfile.ZipInfo(name), data, method)
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
    "big endian": (lambda: rebuilt(order=b"big"), "not little-endian"),
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


SHAPES = [(), (4, 0), (1,), (300, 2), (2, 1, 700_000)]


def packed(tensor: torch.Tensor) -> bytes:
    """Return the whole archive of a contiguous tensor."""
    stream, dtype = io.BytesIO(), str(tensor.dtype).removeprefix("torch.")
    data = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
    bands = [data[: len(data) // 2], data[len(data) // 2 :]]
    with OutputFile(stream) as out:
        write_tensor(out, dtype, tuple(tensor.shape), bands)
        assert out.crc32 == zlib.crc32(stream.getvalue())
    assert stream.tell() == len(data) + overhead(dtype, tuple(tensor.shape))
    return stream.getvalue()


def made(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor in which neighboring bytes differ (bool: alternating 0 and 1)."""
    size = math.prod(shape) * ITEM_SIZE[dtype]
    data = (torch.arange(size) * 37 % (2 if dtype == "bool" else 251)).to(torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in type, shape and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.flatten().view(torch.uint8).equal(other.flatten().view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "shape"), [*((one, (3, 4)) for one in ITEM_SIZE), *(("bfloat16", one) for one in SHAPES)]
)
def test_every_reader_finds_the_tensor(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = made(dtype, shape)
    whole = packed(tensor)
    path = tmp_path / "one"
    path.write_bytes(whole)
    assert same(torch.load(io.BytesIO(whole), weights_only=True), tensor)
    assert same(torch.load(path, weights_only=True, mmap=True), tensor)
    file, place = MappedFile(path), TensorChunk("one", 0, len(whole), (0,) * len(shape), shape)
    found = records(file, place)
    assert [r.name for r in found] == ["data.pkl", "byteorder", "data/0", "version"]
    for record in found:
        record.check(file)
    layout = chunk_layout(file, place, dtype)
    assert (layout.dtype, layout.shape, layout.stride) == (dtype, shape, tensor.stride())
    with zipfile.ZipFile(path) as archive:  # checks the CRC32s, the descriptors' and the directory's places
        assert archive.testzip() is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_pickle_calls_what_torch_save_calls(dtype: str) -> None:
    """The opcodes are torch.save's, except for the memo and shorter forms of small tuples and numbers."""
    tensor = made(dtype, (3, 4))
    stream = io.BytesIO()
    torch.save(tensor, stream)

    def called(data: bytes) -> list[Any]:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            opcodes = pickletools.genops(archive.read("archive/data.pkl"))
            return [arg for op, arg, _ in opcodes if arg is not None and "PUT" not in op.name]

    assert called(packed(tensor)) == called(stream.getvalue())


class _Holes(io.FileIO):
    """A file in which long rows of bytes are left out."""

    def write(self, data: Any, /) -> int:
        if len(data) > 1 << 20:
            self.seek(len(data), os.SEEK_CUR)
            return len(data)
        return super().write(data)


LENGTHS = (2_046_000_000, 2**31 + 5, 5 * 2**30)


@pytest.mark.parametrize("length", [2**32 - 400, *(pytest.param(n, marks=pytest.mark.full) for n in LENGTHS)])
def test_zip64_where_32_bits_end(length: int, tmp_path: Path) -> None:
    """Sparse files with only the last bytes written."""
    path, zeros = tmp_path / "large", memoryview(mmap.mmap(-1, 1 << 28))
    count, rest = divmod(length - 3, len(zeros))
    with _Holes(path, "w") as file:
        write_tensor(file, "uint8", (length,), [zeros[:rest], *[zeros] * count, memoryview(b"abc")])
        assert 0 <= file.tell() - length - overhead("uint8", (length,)) <= 200
    tensor = torch.load(path, weights_only=True, mmap=True)
    assert tensor.shape == (length,) and bytes(tensor[-3:].tolist()) == b"abc"
    mapped = MappedFile(path)
    chunk = TensorChunk("large", 0, mapped.size, (0,), (length,))
    layout = chunk_layout(mapped, chunk, "uint8")
    assert layout.shape == (length,) and bytes(mapped(layout.end - 3, 3)) == b"abc"
    (data,) = (r for r in records(mapped, chunk) if r.name == "data/0")
    assert data.size == length


VALUES = [
    None,
    [],
    [{"args": Namespace(a=1, b=None, c=[1.5, "x"]), "iteration": 0, "checkpoint_version": 3.0}],
    {"big": 1 << 70, "negative": -5, "large": 1 << 40, "nested": {"t": (1, (2, (3,))), "f": float("inf")}},
    {f"key{i}": i for i in range(3000)},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{v!r:.20}")
def test_objects(value: Any, tmp_path: Path) -> None:
    data = object_archive(value)
    assert torch.load(io.BytesIO(data), weights_only=False) == value
    # Megatron declares it for the process; the context would take that back.
    declared = Namespace in torch.serialization.get_safe_globals()
    with nullcontext() if declared else torch.serialization.safe_globals([Namespace]):
        assert torch.load(io.BytesIO(data), weights_only=True) == value
    path = tmp_path / "object"
    path.write_bytes(data)
    file = MappedFile(path)
    for record in records(file, StoredObject("object", 0, len(data))):
        record.check(file)


def test_torch_reads_what_torch_wrote(tmp_path: Path) -> None:
    """An index that is read, written again and read by torch is equal in every field."""
    index = read_metadata(write(tmp_path / "a", tensors(), 3))
    kept = FileSystemReader(tmp_path / "a").read_metadata()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".metadata").write_bytes(index_bytes(index.tensors, index.objects))
    found = FileSystemReader(tmp_path / "b").read_metadata()
    assert found.state_dict_metadata == kept.state_dict_metadata
    assert found.storage_data == kept.storage_data
    assert [type(key.offset) for key in found.storage_data] == [type(key.offset) for key in kept.storage_data]
    assert found.planner_data == {key: (key,) for key in kept.state_dict_metadata}
    assert found.version == "1.0.0"


def test_torch_loads_through_it(tmp_path: Path) -> None:
    """torch loads the tensors into another sharding."""
    made = tensors()
    index = read_metadata(write(tmp_path / "a", made, 3))
    (tmp_path / "a" / ".metadata").write_bytes(index_bytes(index.tensors, index.objects))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(loaded[name].equal(tensor) for name, tensor in made.items() if tensor.dtype.itemsize > 1)
    bits = {name: t.view(torch.uint8) for name, t in made.items() if t.dtype.itemsize == 1}
    assert all(loaded[name].view(torch.uint8).equal(tensor) for name, tensor in bits.items())


def test_every_type(tmp_path: Path) -> None:
    chunk = TensorChunk("__0_0.distcp", 0, 640, (0,), (5,))
    stored = {dtype: DistTensor(dtype, (5,), (chunk,)) for dtype in ITEM_SIZE}
    (tmp_path / ".metadata").write_bytes(index_bytes(stored, {}))
    assert read_metadata(tmp_path) == CheckpointIndex(tmp_path, stored, {})
    found: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for dtype in ITEM_SIZE:
        properties = found.state_dict_metadata[dtype].properties
        assert (properties.dtype, properties.layout) == (getattr(torch, dtype), torch.strided)
        assert properties.memory_format is torch.contiguous_format
        assert not properties.requires_grad and not properties.pin_memory


def test_refused() -> None:
    chunk = TensorChunk("f", 0, 64, (0,), (1,))
    twice = DistTensor("float32", (1,), (chunk, chunk))
    with pytest.raises(ValueError, match="'w' has two parts at"):
        index_bytes({"w": twice}, {})


def test_megatron_reads_the_rest(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.core import maybe_load_config
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    (tmp_path / "metadata.json").write_text(CONFIG_TEXT)
    config = maybe_load_config(str(tmp_path))
    assert config is not None
    assert json.loads(CONFIG_TEXT) == vars(config)
    assert ShardedObject("common_state", None, (1,), (0,)).unique_key == COMMON_OBJECT
