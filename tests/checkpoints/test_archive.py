"""Flip every bit of a torch.save archive: the flip is found, or the tensor loads unchanged."""

from __future__ import annotations

import io
import os
import zipfile

import pytest
import torch

from megatron_nemotron3.checkpoints.archive import ArchiveError, crc_problem, records
from megatron_nemotron3.checkpoints.metadata import TensorChunk
from megatron_nemotron3.checkpoints.pickles import Refused
from megatron_nemotron3.checkpoints.read import chunk_layout
from tests.support import checkpoint_writer as writer


def _problem(descriptor: int, length: int) -> str | None:
    try:
        for record in records(descriptor, 0, length):
            if problem := crc_problem(descriptor, record):
                return problem
        chunk_layout(descriptor, TensorChunk("", 0, length, (0,), (5,)), "bfloat16")
    except (ArchiveError, Refused) as problem:
        return str(problem)
    return None


def _flip(descriptor: int, raw: bytearray, bit: int) -> None:
    raw[bit // 8] ^= 1 << bit % 8
    os.pwrite(descriptor, raw[bit // 8 : bit // 8 + 1], bit // 8)


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.full)])
def test_each_flipped_bit_is_found_or_harmless(step: int) -> None:
    tensor = torch.arange(5, dtype=torch.bfloat16)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    raw = bytearray(stream.getvalue())
    descriptor = os.memfd_create("archive")
    os.pwrite(descriptor, raw, 0)
    assert _problem(descriptor, len(raw)) is None
    bits = set(range(0, 8 * len(raw), step))
    with zipfile.ZipFile(stream) as archive:
        data = archive.getinfo("archive/data/0")
    begin = raw.find(tensor.view(torch.uint8).numpy().tobytes(), data.header_offset)
    values = set(range(8 * begin, 8 * (begin + 10)))
    # The bit that marks an entry as a folder: torch.load then returns uninitialized memory.
    folder_bits = {8 * (at + 38) + 4 for at in range(len(raw)) if raw[at : at + 4] == b"PK\1\2"}
    found = set()
    for bit in sorted(bits | values | folder_bits):
        _flip(descriptor, raw, bit)
        if _problem(descriptor, len(raw)):
            found.add(bit)
        else:
            loaded = torch.load(io.BytesIO(raw), weights_only=True)
            assert writer.same_bytes(loaded, tensor), bit
        _flip(descriptor, raw, bit)
    os.close(descriptor)
    assert values | folder_bits <= found
    assert len(folder_bits) == 7 and 0.3 < len(found) / len(bits) < 1


def test_torch_load_does_not_see_a_flipped_bit() -> None:
    """torch.load does not check CRC32s; `nemotron3 check --full` does."""
    tensor = torch.arange(1000.0)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    raw = bytearray(stream.getvalue())
    raw[raw.find(tensor.numpy().tobytes()) + 42] ^= 1
    assert not torch.equal(torch.load(io.BytesIO(raw), weights_only=True), tensor)


def test_large_archives_have_64_bit_offsets(tmp_path: object) -> None:
    """A record beyond 4 GiB in a sparse file, whose 32-bit fields are all ones."""
    descriptor = os.memfd_create("large")
    with os.fdopen(os.dup(descriptor), "w+b") as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        archive.writestr("archive/version", b"3\n")
        # The header is far away; the bytes between belong to no record.
        file.seek(archive.start_dir + (5 << 30))
        archive.start_dir = file.tell()
        archive.writestr("archive/data/0", b"x" * 100)
    length = os.fstat(descriptor).st_size
    found = records(descriptor, 0, length)
    assert [(r.name, r.size) for r in found] == [("version", 2), ("data/0", 100)]
    assert found[1].offset > 5 << 30 and all(crc_problem(descriptor, r) is None for r in found)
    os.close(descriptor)
