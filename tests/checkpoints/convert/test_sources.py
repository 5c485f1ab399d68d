"""Slices of stored tensors, for any arrangement of blocks in files, type and memory layout."""

from __future__ import annotations

import faulthandler
import io
import itertools
import os
import signal
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.convert.plan import extent
from megatron_nemotron3.checkpoints.convert.sources import (
    Block,
    FileSource,
    Location,
    SourceTensor,
    owned,
    raw,
    row_major,
)
from megatron_nemotron3.checkpoints.convert.torch_dist import index_tensors
from megatron_nemotron3.checkpoints.metadata import (
    CheckpointError,
    CheckpointIndex,
    DistTensor,
    TensorChunk,
    read_metadata,
)
from megatron_nemotron3.checkpoints.read import ArchiveRecord, MappedFiles
from megatron_nemotron3.checkpoints.structure import tiling_problem
from tests.support import checkpoint_writer as writer
from tests.support.checkpoint_reading import read_rows
from tests.support.counted_job import forked


def _cuts(data: st.DataObject, length: int) -> list[tuple[int, int]]:
    inner = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3)))
    ends = [0, *(cut for cut in inner if cut < length), length]
    return list(zip(ends, ends[1:]))


@given(st.data())
def test_every_slice_of_every_layout(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Blocks on a grid, each row-major or transposed in the file, with bytes between them."""
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = data.draw(st.sampled_from(["uint8", "bfloat16", "float32", "int64"]))
    tensor = torch.arange(prod(shape)).to(getattr(torch, dtype)).reshape(shape)
    path = tmp_path_factory.getbasetemp() / "blocks.bin"
    blocks, content = [], b""
    for box in itertools.product(*(_cuts(data, n) for n in shape)):
        part = tensor[tuple(slice(*b) for b in box)]
        content += b"\xff" * data.draw(st.integers(0, 3))
        order = data.draw(st.permutations(range(len(shape))))
        lie = part.permute(order).contiguous()
        stride = [0] * len(shape)
        for axis, step in zip(order, row_major(tuple(lie.shape))):
            stride[axis] = step
        where = Location(path, len(content), tuple(stride))
        lazily = data.draw(st.booleans())
        begin = tuple(a for a, _ in box)
        blocks.append(Block(begin, tuple(part.shape), (lambda w=where: w) if lazily else where))
        content += raw(lie).numpy().tobytes()
    path.write_bytes(content)
    source = FileSource(path.parent, {"t": SourceTensor(dtype, shape, tuple(blocks))}, {})
    slices = []
    for n in shape:
        start = data.draw(st.integers(0, n))
        slices.append((start, data.draw(st.integers(start, n))))
    found = source.read("t", tuple(slices))
    assert found.dtype == tensor.dtype and tuple(found.shape) == extent(tuple(slices))
    assert raw(found).equal(raw(tensor[tuple(slice(*s) for s in slices)]))
    assert raw(source.read("t")).equal(raw(tensor))


def test_products_do_not_depend_on_the_place_in_the_file(tmp_path: Path) -> None:
    weight, x = torch.randn(33, 70), torch.randn(70, 5)
    places = []
    for shift in (0, 1, 13):
        path = tmp_path / str(shift)
        path.write_bytes(bytes(shift) + weight.numpy().tobytes())
        places.append(Block((0, 0), (33, 70), Location(path, shift, (70, 1))))
    tensors = {str(i): SourceTensor("float32", (33, 70), (block,)) for i, block in enumerate(places)}
    source = FileSource(tmp_path, tensors, {})
    for name in tensors:
        assert (owned(source.read(name), torch.float32) @ x).equal(weight @ x)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    block = Block((0, 0), (2, 4), Location(tmp_path / "a", 0, (4, 1)))
    source = FileSource(tmp_path, {"gap": SourceTensor("uint8", (4, 4), (block,))}, {})
    with pytest.raises(CheckpointError, match="hold 8 of 16 elements"):
        source.read("gap")


@pytest.mark.parametrize("present", [40, 0])
def test_a_file_that_becomes_shorter(tmp_path: Path, present: int) -> None:
    """Before it is mapped, and after it: what is gone is not touched, which would end the process."""
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    block = Block((0,), (100,), Location(path, 0, (1,)))
    late, early = (FileSource(tmp_path, {"t": SourceTensor("uint8", (100,), (block,))}, {}) for _ in "ab")
    assert early.read("t").numel() == 100
    os.truncate(path, present)

    def read() -> None:
        faulthandler.disable()
        for source, message in (
            (early, f"{path}: the file had 100 bytes when it was opened, now it has {present}"),
            (late, f"{path}: the file ends at byte {present}, inside the 100 from 0"),
        ):
            with pytest.raises(CheckpointError, match=message):
                source.read("t").sum()

    assert os.waitpid(forked(read), 0)[1] == 0


def test_a_read_tensor_cannot_change_the_file(tmp_path: Path) -> None:
    """It is a view of a mapping that cannot be written to: a process that tries ends."""
    (tmp_path / "a").write_bytes(bytes(range(100)))
    block = Block((0,), (100,), Location(tmp_path / "a", 0, (1,)))
    tensor = FileSource(tmp_path, {"t": SourceTensor("uint8", (100,), (block,))}, {}).read("t")

    def write() -> None:
        faulthandler.disable()
        tensor[3] = 7

    assert os.WTERMSIG(os.waitpid(forked(write), 0)[1]) in (signal.SIGSEGV, signal.SIGBUS)
    assert (tmp_path / "a").read_bytes() == bytes(tensor.tolist()) == bytes(range(100))


def test_each_record_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is used for the first time, however many slices are read; a damaged one each time."""
    index = read_metadata(writer.write(tmp_path / "iter_0000001", writer.tensors(), 3))
    checked: list[tuple[Path, int]] = []
    check = ArchiveRecord.check

    def counting(self: ArchiveRecord, file: object) -> None:
        if self.name.startswith("data/"):
            checked.append((file.path, self.offset))  # type: ignore[attr-defined]
        check(self, file)  # type: ignore[arg-type]

    monkeypatch.setattr(ArchiveRecord, "check", counting)
    opened = MappedFiles()
    source = FileSource(index.folder, index_tensors(index, opened), {}, opened)
    name, tensor = next((n, t) for n, t in source.tensors.items() if t.shape and t.shape[0] > 3)
    source.read(name, tuple((0, 1) for _ in tensor.shape))
    assert len(checked) == 1
    for _ in range(2):
        for other in source.tensors:
            source.read(other)
    assert len(set(checked)) == len(checked) == len({(c.file, c.offset) for c in _chunks(index)})
    path, offset = checked[0]
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    source = FileSource(index.folder, index_tensors(index, MappedFiles()), {})
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"{path}: record 'data/.*CRC32"):
            source.read(name)


def _chunks(index: object) -> list:
    return [chunk for tensor in index.tensors.values() for chunk in tensor.chunks if 0 not in chunk.sizes]  # type: ignore[attr-defined]


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


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _cover(shape: tuple[int, ...], boxes: list[Box]) -> dict[tuple[int, ...], int]:
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for point in product(*(range(o, o + s) for o, s in zip(offsets, sizes))):
            counts[point] += 1
    return counts


def _tiles(draw: st.DrawFn, low: tuple[int, ...], size: tuple[int, ...], depth: int) -> list[Box]:
    axes = [axis for axis, n in enumerate(size) if n > 1]
    if not axes or not depth or not draw(st.booleans()):
        return [(low, size)]
    axis = draw(st.sampled_from(axes))
    cut = draw(st.integers(1, size[axis] - 1))
    first, second, middle = [*size], [*size], [*low]
    first[axis], second[axis], middle[axis] = cut, size[axis] - cut, low[axis] + cut
    return [
        *_tiles(draw, low, tuple(first), depth - 1),
        *_tiles(draw, tuple(middle), tuple(second), depth - 1),
    ]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    return shape, draw(st.permutations(_tiles(draw, (0,) * len(shape), shape, 4)))


@settings(max_examples=120)
@given(tiling=tilings(), data=st.data())
def test_tilings_and_what_is_left_of_them(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    assert tiling_problem(shape, boxes) is None
    changed = list(boxes)
    for _ in range(data.draw(st.integers(1, 2))):
        box = data.draw(st.sampled_from(boxes))
        if data.draw(st.booleans()) and box in changed:
            changed.remove(box)
        else:
            changed.append(box)
    counts = _cover(shape, changed)
    wrong = min((point for point, n in counts.items() if n != 1), default=None)
    problem = tiling_problem(shape, changed)
    if wrong is None:
        assert problem is None
    else:
        assert problem is not None and f"at {list(wrong)};" in problem
        assert ("overlap" in problem) == (counts[wrong] > 1)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0,), (2, 2))], "does not have 2 dimensions"),
        ([((0, 0), (4, 4)), ((3, 0), (2, 4))], "reaches beyond"),
        ([], r"no chunk covers the elements at \[0, 0\]; its chunks hold 0 of 16"),
    ],
)
def test_boxes_that_do_not_fit(boxes: list[Box], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(tiling_problem((4, 4), boxes))
