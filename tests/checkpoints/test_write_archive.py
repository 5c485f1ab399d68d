"""Archives that the converter writes are read by torch.load, zipfile and our own reader."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickletools
import zipfile
import zlib
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.metadata import (
    ITEM_SIZE,
    CheckpointIndex,
    DistTensor,
    StoredObject,
    TensorChunk,
)
from megatron_nemotron3.checkpoints.read import MappedFile, chunk_layout, records
from megatron_nemotron3.checkpoints.structure import check_integrity
from megatron_nemotron3.checkpoints.write import object_archive, overhead, write_tensor
from tests.support.checkpoint_reading import read_rows

SHAPES = [(), (0,), (4, 0), (0, 4), (1,), (3, 4), (300, 2), (2, 1, 70_000)]


def packed(tensor: torch.Tensor) -> bytes:
    """Return the whole archive of a contiguous tensor."""
    stream, dtype = io.BytesIO(), str(tensor.dtype).removeprefix("torch.")
    data = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
    bands = [data[: len(data) // 2], data[len(data) // 2 :]]
    write_tensor(stream, dtype, tuple(tensor.shape), bands)
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


@pytest.mark.parametrize("dtype", ITEM_SIZE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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


def test_a_folder_of_them_passes_the_full_check_and_a_flipped_bit_does_not(tmp_path: Path) -> None:
    tensors = {f"t{i}": made(dtype, (5, 7)) for i, dtype in enumerate(("bfloat16", "float32", "uint8"))}
    blob, stored = b"", {}
    for name, tensor in tensors.items():
        whole = packed(tensor)
        chunk = TensorChunk("__0_0.distcp", len(blob), len(whole), (0, 0), (5, 7))
        stored[name] = DistTensor(str(tensor.dtype).removeprefix("torch."), (5, 7), (chunk,))
        blob += whole
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(blob)
    index = CheckpointIndex(tmp_path, stored, {})
    result = check_integrity(tmp_path, index)
    assert (result.problems, result.records, result.bytes, result.unprotected) == ((), 12, len(blob), 0)
    for name, tensor in tensors.items():
        assert same(read_rows(index, name), tensor)
    at = blob.index(tensors["t1"].flatten().view(torch.uint8).numpy().tobytes())
    path.write_bytes(blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :])
    (problem,) = check_integrity(tmp_path, index).problems
    assert "t1" in problem and "CRC32" in problem


class _Holes:
    """A file in which long rows of bytes are left out."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file

    def write(self, data: Any, /) -> int:
        if len(data) > 1 << 20:
            self._file.seek(len(data), os.SEEK_CUR)
            return len(data)
        return self._file.write(data)


@pytest.mark.parametrize("length", [2**31 + 5, 2**32 - 2000, 2**32 - 400, 2**32 - 1, 2**32 + 5, 5 * 2**30])
def test_zip64_where_32_bits_end(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse files with only the last bytes written. The CRC32 is arbitrary; torch does not check it."""

    def arbitrary(data: Any, crc: int = 0) -> int:
        return zlib.crc32(data, crc) if len(data) <= 1 << 20 else 7

    monkeypatch.setattr(zipfile, "crc32", arbitrary)
    path, zeros = tmp_path / "large", memoryview(mmap.mmap(-1, 1 << 28))
    count, rest = divmod(length - 3, len(zeros))
    with open(path, "wb") as file:
        write_tensor(_Holes(file), "uint8", (length,), [zeros[:rest], *[zeros] * count, memoryview(b"abc")])
        assert 0 <= file.tell() - overhead("uint8", (length,)) - length <= 200
    tensor = torch.load(path, weights_only=True, mmap=True)
    assert tensor.shape == (length,) and bytes(tensor[-3:].tolist()) == b"abc"
    mapped = MappedFile(path)
    chunk = TensorChunk("large", 0, mapped.size, (0,), (length,))
    layout = chunk_layout(mapped, chunk, "uint8")
    assert layout.shape == (length,) and bytes(mapped(layout.end - 3, 3)) == b"abc"
    (data,) = (r for r in records(mapped, chunk) if r.name == "data/0")
    assert (data.crc, data.size) == (zlib.crc32(b"abc", 7), length)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from(sorted(ITEM_SIZE)))
def test_any_shape(shape: list[int], dtype: str) -> None:
    tensor = made(dtype, tuple(shape))
    assert same(torch.load(io.BytesIO(packed(tensor)), weights_only=True), tensor)


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
