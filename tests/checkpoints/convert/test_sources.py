"""Slices of tensors are read correctly for any arrangement of their blocks in files."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.convert import sources
from megatron_nemotron3.checkpoints.convert.plan import whole
from megatron_nemotron3.checkpoints.convert.sources import (
    Block,
    FileSource,
    Location,
    SourceTensor,
    row_major,
)
from megatron_nemotron3.checkpoints.metadata import CheckpointError


def _cuts(data: st.DataObject, length: int) -> list[tuple[int, int]]:
    inner = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3)))
    ends = [0, *(cut for cut in inner if cut < length), length]
    return list(zip(ends, ends[1:]))


@given(st.data())
def test_every_slice_of_every_layout(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Blocks on a grid, each row-major or transposed in the file, with bytes between them."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(["uint8", "bfloat16", "float32", "int64"]))
    array = numpy.arange(numpy.prod(shape), dtype=sources.bits(dtype)).reshape(shape)
    grid = [_cuts(data, n) for n in shape]
    path = tmp_path_factory.getbasetemp() / "blocks.bin"
    blocks, content = [], b""
    for index in numpy.ndindex(*(len(cuts) for cuts in grid)):
        box = [cuts[i] for cuts, i in zip(grid, index)]
        part = array[tuple(slice(*b) for b in box)]
        content += b"\xff" * data.draw(st.integers(0, 3))
        order = data.draw(st.permutations(range(len(shape))))
        lie = numpy.ascontiguousarray(part.transpose(order))
        stride = [0] * len(shape)
        for axis, step in zip(order, row_major(lie.shape)):
            stride[axis] = step
        where = Location(path, len(content), tuple(stride))
        lazily = data.draw(st.booleans())
        sizes = tuple(part.shape)
        blocks.append(Block(tuple(a for a, _ in box), sizes, (lambda w=where: w) if lazily else where))
        content += lie.tobytes()
    path.write_bytes(content)
    source = FileSource(path.parent, {"t": SourceTensor(dtype, shape, tuple(blocks))}, {})
    slices = []
    for n in shape:
        start = data.draw(st.integers(0, n))
        slices.append((start, data.draw(st.integers(start, n))))
    found = source.read("t", tuple(slices))
    source.close()
    assert found.flags.c_contiguous
    numpy.testing.assert_array_equal(found, array[tuple(slice(*s) for s in slices)])


def test_a_band_of_columns_is_read_in_bounded_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = numpy.arange(64 * 100, dtype="u2").reshape(64, 100)
    array.tofile(tmp_path / "a")
    lengths: list[int] = []
    read_into = sources.read_into
    monkeypatch.setattr(sources, "_SPAN", 1000)
    monkeypatch.setattr(sources, "read_into", lambda d, v, o: (lengths.append(len(v)), read_into(d, v, o)))
    tensor = SourceTensor(
        "bfloat16", (64, 100), (Block((0, 0), (64, 100), Location(tmp_path / "a", 0, (100, 1))),)
    )
    source = FileSource(tmp_path, {"t": tensor}, {})
    numpy.testing.assert_array_equal(source.read("t", ((3, 60), (10, 30))), array[3:60, 10:30])
    source.close()
    assert max(lengths) <= 1000 and len(lengths) > 10


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_OPEN", 2)
    tensors = {}
    for i in range(5):
        (tmp_path / str(i)).write_bytes(bytes([i]))
        tensors[str(i)] = SourceTensor(
            "uint8", (1,), (Block((0,), (1,), Location(tmp_path / str(i), 0, (1,))),)
        )
    source = FileSource(tmp_path, tensors, {})
    assert [int(source.read(str(i), ((0, 1),))[0]) for i in (0, 1, 2, 3, 4, 0, 4)] == [0, 1, 2, 3, 4, 0, 4]
    assert len(source._open) == 2
    source.close()


def test_a_source_that_nobody_closes_closes_its_files_when_it_goes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    tensor = SourceTensor("uint8", (1,), (Block((0,), (1,), Location(tmp_path / "a", 0, (1,))),))
    source = FileSource(tmp_path, {"a": tensor}, {})
    source.read("a", ((0, 1),))
    (descriptor,) = source._open.values()
    os.fstat(descriptor)
    del source
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    layout = Location(tmp_path / "a", 0, (4, 1))
    tensors = {
        "short": SourceTensor("uint8", (4, 4), (Block((0, 0), (4, 4), layout),)),
        "gap": SourceTensor("uint8", (4, 4), (Block((0, 0), (2, 4), layout),)),
        "gone": SourceTensor("uint8", (1,), (Block((0,), (1,), Location(tmp_path / "b", 0, (1,))),)),
    }
    source = FileSource(tmp_path, tensors, {})
    for name, message in (
        ("short", "the file ends at byte 10, inside the 16 from 0"),
        ("gap", "hold 8 of 16 elements"),
        ("gone", "No such file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            source.read(name, whole(tensors[name].shape))
    source.close()
