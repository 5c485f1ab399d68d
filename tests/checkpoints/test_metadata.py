"""The index is read without torch. Pickles that would run code are refused by name."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_metadata
from megatron_nemotron3.checkpoints.unpickle import Refused, loads
from tests.support import checkpoint_writer as writer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return writer.write(tmp_path_factory.mktemp("metadata") / "iter_0000002", writer.tensors(), 2)


def test_agrees_with_torch(folder: Path) -> None:
    mine, theirs = read_metadata(folder), FileSystemReader(folder).read_metadata()
    assert {*mine.tensors, *mine.objects} == set(theirs.state_dict_metadata)
    assert set(mine.objects) == {"common_state/shard_0_1"}
    places = {
        (k.fqn, k.offset): (v.relative_path, v.offset, v.length) for k, v in theirs.storage_data.items()
    }
    for name, tensor in mine.tensors.items():
        entry = theirs.state_dict_metadata[name]
        assert (tensor.dtype, tensor.shape) == (str(entry.properties.dtype)[6:], tuple(entry.size))
        assert [(c.offsets, c.sizes) for c in tensor.chunks] == [
            (tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks
        ]
        for chunk in tensor.chunks:
            place = places[name, torch.Size(chunk.offsets)]
            assert (chunk.file, chunk.offset, chunk.length) == place
    assert mine.files == {p.name: p.stat().st_size for p in sorted(folder.glob("*.distcp"))}


def test_reading_imports_nothing(folder: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from megatron_nemotron3.checkpoints import check, metadata\n"
        f"metadata.read_metadata({str(folder)!r})\n"
        f"assert check.check(Path({str(folder)!r}), full=True) == 0\n"
        "print([m for m in ('torch', 'megatron.core', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


class _Call:
    def __init__(self, function: object, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("hostile", "name"),
    [
        (_Call(os.system, "touch HIT"), "system"),
        (_Call(subprocess.check_call, ["touch", "HIT"]), "check_call"),
        (_Call(eval, "open('HIT', 'w')"), "eval"),
        (_Call(pickle.loads, pickle.dumps(1)), "loads"),
        (_Call(torch.load, "HIT"), "torch.serialization.load"),
        (_Call(torch.hub.load, "a", "b"), "torch.hub.load"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_hostile_pickles_are_refused_by_name(
    hostile: object, name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": [hostile]}, protocol))
    with pytest.raises(CheckpointError) as refused:
        read_metadata(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / '.metadata'}: ")
    assert "it names " in str(refused.value)
    assert f"{name}, which no checkpoint needs" in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == [".metadata"]


def test_a_pickle_cannot_change_the_stand_ins(folder: Path, tmp_path: Path) -> None:
    """BUILD applied to a class sets attributes of the class."""
    named = b"cmegatron.x\nA\n"
    for attack in (
        b"\x80\x02" + named + b"}N\x86b.",  # BUILD on the class itself
        b"\x80\x02" + named + b"N}X\x01\x00\x00\x00aK\x01s\x86b.",  # with slots
        b"\x80\x02}r\xff\xff\xff\x7f.",  # an index that makes a table of 16 GB
        b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00.",  # a bytearray of 64 GB
        b"\x82\x01.",  # the registry of extensions
        b"P1\n.",
        b"",
    ):
        with pytest.raises(Refused):
            loads(attack, {}, stubs=("megatron.",))
    assert read_metadata(folder).tensors


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_pickles_are_refused_or_read(folder: Path, data: st.DataObject, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    """Any bytes give an index or a CheckpointError, and nothing else."""
    raw = bytearray((folder / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(raw))))
    place = tmp_path_factory.mktemp("damaged")
    (place / ".metadata").write_bytes(bytes(raw[:cut]))
    try:
        assert read_metadata(place).items
    except CheckpointError as refused:
        assert str(refused).startswith(str(place / ".metadata"))


@pytest.mark.parametrize("file", ["../other", "/etc/passwd", "a/../../b", ""])
def test_files_outside_the_folder_are_refused(file: str, folder: Path, tmp_path: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    for info in index.storage_data.values():
        info.relative_path = file
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_metadata(tmp_path)
