"""Files are written as streams: while one band is written, a thread computes its checksum."""

from __future__ import annotations

import io
import threading
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.convert import streams
from megatron_nemotron3.checkpoints.convert.plan import Slices, whole
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, OutputFile, Part, as_bytes, write
from megatron_nemotron3.checkpoints.convert.views import InMemory
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from tests.support.counted_job import Numbers


class Short(io.BytesIO):
    """A file that takes a few bytes at a time, as the system may."""

    def write(self, data: object, /) -> int:
        return super().write(memoryview(data)[:5])  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=40), max_size=9), st.integers(1, 50))
def test_length_and_checksum_of_what_is_written(data: list[bytes], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_WRITE", size)
        file, counted, reached = Short(), [], 0
        with OutputFile(file, counted.append) as out:
            for one in data:
                assert out.write(memoryview(one)) == len(one)
                reached += len(one)
                assert out.length == reached
            found = out.crc32
    assert file.getvalue() == b"".join(data)
    assert found == zlib.crc32(b"".join(data)) and sum(counted) == reached


def plan(archives: bool = False) -> FilePlan:
    parts = [Part(b"head")]
    for i in range(6):
        parts += [Part(b"<" * i), Part(tensor=f"t{i}", slices=whole((40, 8)), dtype="uint8")]
    parts += [Part(tensor="t1", slices=((3, 9), (0, 8)), dtype="uint8"), Part(b"end")]
    return FilePlan("file", parts, archives)


@pytest.mark.parametrize("archives", [False, True])
@pytest.mark.parametrize("size", [8, 24, 100, 1 << 20])
def test_the_parts_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, archives: bool
) -> None:
    monkeypatch.setattr(streams, "BAND", size)
    monkeypatch.setattr(streams, "_WRITE", 17)
    source, counted = Numbers(tmp_path), []
    entry = write(plan(archives), source, tmp_path / "file", counted.append)
    data = (tmp_path / "file").read_bytes()
    places = entry.pop("places") if archives else []
    assert entry == {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    assert sum(counted) == len(data) == plan(archives).length
    expected = [
        source.read(p.tensor, p.slices).numpy().tobytes() if p.tensor else p.data for p in plan().parts
    ]
    if not archives:
        assert data == b"".join(expected)
        return
    for (begin, length), part, plain in zip(places, plan().parts, expected, strict=True):
        stored = data[begin : begin + length]
        if part.tensor:
            stored = torch.load(io.BytesIO(stored), weights_only=True).numpy().tobytes()
        assert stored == plain


@pytest.mark.parametrize("tensor", [torch.arange(12).view(3, 4).t(), torch.arange(24)[::2], torch.ones(())])
def test_bytes_are_in_row_major_order(tensor: torch.Tensor) -> None:
    assert as_bytes(tensor) == tensor.numpy().tobytes()


def test_few_bands_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A band is read when the one before it is written, even if the disk is slow."""
    monkeypatch.setattr(streams, "BAND", 8)
    monkeypatch.setattr(streams, "_WRITE", 8)
    made, written = 0, 0
    source = Numbers(tmp_path)
    read = source.read

    def counting(name: str, slices: Slices) -> torch.Tensor:
        nonlocal made
        made += 1
        assert made <= written + 1
        return read(name, slices)

    def look(length: int) -> None:
        nonlocal written
        written += 1

    monkeypatch.setattr(source, "read", counting)
    write(plan(), source, tmp_path / "file", look)
    assert made == 6 * 40 + 6


def test_what_goes_wrong_ends_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Numbers(tmp_path)
    read = source.read

    def damaged(name: str, slices: Slices) -> torch.Tensor:
        if name == "t3":
            raise CheckpointError("t3 is damaged")
        return read(name, slices)

    def full(length: int) -> None:
        raise OSError("disk full")

    before = threading.active_count()
    with pytest.raises(OSError, match="disk full"):
        write(plan(), source, tmp_path / "file", full)
    monkeypatch.setattr(source, "read", damaged)
    with pytest.raises(CheckpointError, match="t3 is damaged"):
        write(plan(True), source, tmp_path / "file", lambda length: None)
    assert not list(tmp_path.iterdir()) and threading.active_count() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 0.0])
def test_values_that_are_not_finite(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    """One among the largest numbers of the type, whose sum is not finite either."""
    tensor = torch.full((50, 3), torch.finfo(dtype).max, dtype=dtype)
    tensor[17, 1] = value
    source = InMemory(tmp_path, {"w": tensor})
    part = Part(tensor="w", slices=whole((50, 3)), dtype=str(dtype).removeprefix("torch."))
    one = FilePlan("file", [part])
    if value:
        with pytest.raises(CheckpointError, match="w has values that are NaN or infinite: --allow-nonfin"):
            write(one, source, tmp_path / "file", lambda length: None)
    write(one, source, tmp_path / "file", lambda length: None, finite=not value)
    assert (tmp_path / "file").read_bytes() == as_bytes(tensor)
