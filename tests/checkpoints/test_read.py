"""Rows of stored tensors of every type and memory layout equal those of torch.load; memory is bounded."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.metadata import (
    CheckpointError,
    CheckpointIndex,
    DistTensor,
    TensorChunk,
    read_metadata,
)
from tests.support import checkpoint_writer as writer
from tests.support.checkpoint_reading import read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return writer.write(tmp_path_factory.mktemp("read") / "iter_0000002", writer.tensors(), 2)


def read_chunk(
    folder: Path, chunk: TensorChunk, dtype: torch.dtype, rows: slice | None = None
) -> torch.Tensor:
    """Read one chunk as if it were the whole tensor."""
    alone = TensorChunk(chunk.file, chunk.offset, chunk.length, (0,) * len(chunk.sizes), chunk.sizes)
    tensor = DistTensor(str(dtype).removeprefix("torch."), chunk.sizes, (alone,))
    return read_rows(CheckpointIndex(folder, {"chunk": tensor}, {}), "chunk", rows)


def test_whole_tensors_and_chunks(folder: Path) -> None:
    index, expected = read_metadata(folder), writer.tensors()
    for name, tensor in expected.items():
        assert writer.same_bytes(read_rows(index, name), tensor), name
        for chunk in index.tensors[name].chunks:
            window = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))
            assert writer.same_bytes(read_chunk(folder, chunk, tensor.dtype), tensor[window]), name


def test_the_writer_of_these_tests_is_read_by_torch(folder: Path) -> None:
    expected = writer.tensors()
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert all(writer.same_bytes(state[name], tensor) for name, tensor in expected.items())


@settings(max_examples=40)
@given(data=st.data())
def test_any_rows(folder: Path, data: st.DataObject) -> None:
    expected = {name: t for name, t in writer.tensors().items() if t.ndim}
    name = data.draw(st.sampled_from(sorted(expected)))
    bound = st.one_of(st.none(), st.integers(-14, 14))
    rows = slice(data.draw(bound), data.draw(bound))
    assert writer.same_bytes(read_rows(read_metadata(folder), name, rows), expected[name][rows])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(24.0).view(4, 6)[1:3, 2:],
        torch.arange(24.0)[5:9],
        torch.arange(6.0).expand(3, 6),
        torch.nn.Parameter(torch.ones(3, 2)),
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.randint(0, 256, (3, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu),
        torch.randint(0, 256, (3, 4), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.zeros(3, 2, dtype=torch.uint16),
        torch.zeros(2, dtype=torch.complex64),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}",
)
def test_memory_layouts_and_types(tensor: torch.Tensor, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    (tmp_path / "f").write_bytes(b"in front" + stream.getvalue() + b"behind")
    chunk = TensorChunk("f", 8, len(stream.getvalue()), (0,) * tensor.ndim, tuple(tensor.shape))
    expected = tensor.detach()
    assert writer.same_bytes(read_chunk(tmp_path, chunk, tensor.dtype), expected)
    assert writer.same_bytes(read_chunk(tmp_path, chunk, tensor.dtype, slice(1, 2)), expected[1:2])
    assert read_chunk(tmp_path, chunk, tensor.dtype, slice(2, 2)).shape == expected[2:2].shape


def test_rows_cost_their_own_memory(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 22, dtype=torch.float32).view(4096, 1024)  # 16 MB
    index = read_metadata(writer.write(tmp_path / "iter_0000001", {"w": tensor}, 1))
    tracemalloc.start()
    rows = read_rows(index, "w", slice(100, 104))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(rows, tensor[100:104])
    assert peak < 200_000  # 16 KB of rows and Python's own


def test_errors_name_the_file(folder: Path, tmp_path: Path) -> None:
    index = read_metadata(folder)
    chunk = index.tensors["packed"].chunks[0]
    with pytest.raises(CheckpointError, match=f"{tmp_path / chunk.file}: No such file"):
        read_chunk(tmp_path, chunk, torch.uint8)
    (tmp_path / chunk.file).write_bytes((folder / chunk.file).read_bytes()[: chunk.offset + 100])
    with pytest.raises(CheckpointError, match=f"{tmp_path / chunk.file}: .*ends"):
        read_chunk(tmp_path, chunk, torch.uint8)
    other = TensorChunk(chunk.file, chunk.offset, chunk.length, chunk.offsets, (2, 8))
    with pytest.raises(
        CheckpointError, match=r"holds uint8 of shape \[4, 4\], .metadata says uint8 of shape \[2, 8\]"
    ):
        read_chunk(folder, other, torch.uint8)
    with pytest.raises(CheckpointError, match="holds uint8 of shape .*, .metadata says int8"):
        read_chunk(folder, chunk, torch.int8)
