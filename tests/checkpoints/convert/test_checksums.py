"""Stored CRC32s are compared while a conversion reads, although it reads in pieces."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.archive import ArchiveRecord, records
from megatron_nemotron3.checkpoints.convert import checksums
from megatron_nemotron3.checkpoints.convert import job as job_module
from megatron_nemotron3.checkpoints.convert.checksums import Reads
from megatron_nemotron3.checkpoints.convert.job import JOURNAL, partial_of
from megatron_nemotron3.checkpoints.convert.streams import write
from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_metadata
from megatron_nemotron3.checkpoints.read import opened
from megatron_nemotron3.models import get, tiny
from tests.support.hf_folders import write_hf

DATA = bytes(range(256)) * 3
SUPER = tiny(get("super")).but(vocab_size=200)
_PIECES = st.lists(st.tuples(st.integers(0, 700), st.integers(1, 200)), max_size=12)


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 200)), max_size=12), st.booleans(), st.booleans()
)
def test_pieces_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, int]], flip: bool, split: bool
) -> None:
    """Whatever was read, gaps and overlaps included: the record is compared, and a flipped bit is found."""
    folder = tmp_path_factory.getbasetemp()
    data = bytearray(b"head" + DATA + b"tail")
    record = ArchiveRecord("data/0", zlib.crc32(DATA), 4, len(DATA))
    if flip:
        data[300] ^= 4
    (folder / "file").write_bytes(data)
    reads, other = Reads(folder), Reads(folder)
    for number, (begin, length) in enumerate(pieces):
        some = numpy.frombuffer(bytes(data[4 + begin : 4 + min(begin + length, len(DATA))]), "u1")
        (other if split and number % 2 else reads).add(folder / "file", record, 4 + begin, some)
    if not flip or not pieces:
        reads.merge(json.loads(json.dumps(other.take())))
        reads.finish()
        assert not reads.take()
        return
    with pytest.raises(CheckpointError, match=r"record 'data/0' \(bytes 4 to 772\) has CRC32"):
        reads.merge(json.loads(json.dumps(other.take())))
        reads.finish()


def test_bytes_that_were_read_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(DATA)
    record, read = ArchiveRecord("data/0", zlib.crc32(DATA), 0, len(DATA)), []
    monkeypatch.setattr(checksums, "read_at", lambda d, at, n: read.append((at, n)) or DATA[at : at + n])
    reads = Reads(tmp_path)
    for begin, end in ((512, 768), (0, 256), (256, 500)):
        reads.add(tmp_path / "file", record, begin, numpy.frombuffer(DATA[begin:end], "u1"))
    reads.finish()
    assert read == [(500, 12)]


def test_the_checksum_of_another_array_is_computed() -> None:
    reads = Reads(Path())
    one = numpy.arange(64, dtype="u2")
    reads.add(Path("a"), ArchiveRecord("x", 5, 0, 128), 0, one)
    assert reads.crc32(one.reshape(8, 8)) == zlib.crc32(one)
    assert reads.crc32(one[:32]) == zlib.crc32(one[:32])
    assert reads.crc32(one[1:]) == zlib.crc32(one[1:])
    assert reads.crc32(one + 1) == zlib.crc32(one + 1)


# -- bit rot -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    write_hf(folder / "hf", SUPER)
    _run(0, "convert", "from-hf", folder / "hf", folder / "megatron")
    return folder


def _run(expected: int, *words: object) -> None:
    assert cli.main([*map(str, words), "--workers", "1"]) == expected


def _flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _data_of(folder: Path, name: str) -> tuple[Path, ArchiveRecord]:
    """File and record of the last chunk of a tensor."""
    chunk = read_metadata(folder).tensors[name].chunks[-1]
    with opened(folder / chunk.file) as descriptor:
        found = records(descriptor, chunk.offset, chunk.length)
    return folder / chunk.file, next(record for record in found if record.name.startswith("data/"))


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "embedding.word_embeddings.weight",
        "decoder.final_norm.weight",
    ],
)
def test_a_flipped_bit_is_found(
    sound: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the last element of the embedding, which is padding that no conversion reads."""
    folder = tmp_path / "megatron"
    shutil.copytree(sound / "megatron", folder)
    index = read_metadata(folder / "release").tensors
    name = next(key for key in index if key.startswith(name))  # in_proj is stored in parts
    path, record = _data_of(folder / "release", name)
    _flip(path, record.offset + record.size - 1)
    for words in (
        ("convert", "to-hf", folder, tmp_path / "out"),
        ("convert", "to-hf", folder, tmp_path / "small", "--shard-size", "100KB"),
        ("convert", "to-hf", folder, tmp_path / "cast", "--dtype", "float32"),
        ("verify", sound / "hf", folder),
    ):
        capsys.readouterr()
        _run(2, *words)
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and f"{path}: record {record.name!r} (bytes" in error
        assert not (tmp_path / "out").exists()
    assert cli.main(["convert", "to-hf", str(folder), str(tmp_path / "two"), "--workers", "2"]) == 2


def test_generate_compares(sound: Path, tmp_path: Path) -> None:
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_megatron
    from megatron_nemotron3.inference.generate.decode import read_weights

    folder = tmp_path / "megatron"
    shutil.copytree(sound / "megatron", folder)
    read_weights(open_megatron(folder).hf_view(), SUPER)
    path, record = _data_of(folder / "release", "output_layer.weight")
    _flip(path, record.offset)
    opened = open_megatron(folder)
    with pytest.raises(CheckpointError, match="has CRC32"):
        read_weights(opened.hf_view(), opened.config)


def test_after_an_interruption_too(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that was read in part before the interruption is compared by the command that continues."""
    folder, out = tmp_path / "megatron", tmp_path / "out"
    shutil.copytree(sound / "megatron", folder)
    path, record = _data_of(folder / "release", "embedding.word_embeddings.weight")
    _flip(path, record.offset + record.size - 1)
    done: list[str] = []

    def interrupted(*args: object, **options: object) -> int:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append("one")
        return write(*args, **options)  # type: ignore[arg-type]

    words = ("convert", "to-hf", folder, out, "--shard-size", "100KB")
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "write", interrupted)
        _run(130, *words)
    lines = [json.loads(line) for line in (partial_of(out) / JOURNAL).read_text().splitlines()]
    assert any(line.get("read") for line in lines[1:]), "no record was read in part"
    capsys.readouterr()
    _run(2, *words)
    assert f"{path}: record" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    "rest",
    [
        5,
        [5],
        [["no.distcp", "data/0", 1, 0, 9, []]],
        [["release/__0_0.distcp", "data/0", -1, 0, 9, []]],
        [["release/__0_0.distcp", "data/0", 1, 0, 9, [[0, 1]]]],
        [["release/__0_0.distcp", "data/0", 1, 0, 9, [[0, 1, "2"]]]],
    ],
)
def test_a_journal_without_sense(tmp_path: Path, rest: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Reads(tmp_path).merge(rest, ["release/__0_0.distcp"])  # type: ignore[arg-type]
