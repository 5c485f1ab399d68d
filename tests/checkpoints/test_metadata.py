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
from megatron_nemotron3.checkpoints.pickles import Pickle, Refused, arguments, try_all
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


@pytest.mark.parametrize("named", [b"cmegatron.x\nA\n", b"cio\nfunction\n"])
@pytest.mark.parametrize("build", [b"}X\x01\x00\x00\x00aK\x01sb.", b"N}X\x01\x00\x00\x00aK\x01s\x86b."])
def test_a_pickle_cannot_change_the_stand_ins(named: bytes, build: bytes) -> None:
    """BUILD applied to a class or a function sets its attributes; the second form, with slots."""
    table = {("io", "function"): arguments}
    with pytest.raises(Refused):
        Pickle(b"\x80\x02" + named + build, table, stubs=("megatron.",)).loaded()
    assert vars(arguments) == {}


#: A tuple that contains a tuple twice, 60 levels deep.
_TWICE = b")" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
_LISTS = b"]q\x00" + b"".join(b"]q%ch%cah%ca" % (n + 1, n, n) for n in range(60))
#: Case -> (pickle, part of the message).
HUNGRY = {
    "a memo of 16 GB": (b"\x80\x02}r\xff\xff\xff\x7f.", "MiB of memory"),
    "a memo of 64 GB, in text": (b"}p4294967295\n.", "MiB of memory"),
    "a bytearray of 64 GB": (b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00.", "MiB of memory"),
    "a key of 2^60 steps": (b"\x80\x02}" + _TWICE + b"K\x01s.", "more than 3 s"),
    "a set of 2^60 steps": (b"\x80\x04(" + _TWICE + b"\x91.", "more than 3 s"),
    "a tuple of 2^60": (b"\x80\x02" + _TWICE + b".", "shared objects"),
    "a list of 2^60": (b"\x80\x02" + _LISTS + b".", "shared objects"),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", "deep"),
    "a deep list": (b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".", "deep"),
    "a deep tuple": (b"\x80\x02)" + b"\x85" * 10**6 + b".", "deep"),
    "a deep key": (b"\x80\x02})" + b"\x85" * 10**7 + b"Ns.", "signal 11"),
    "the registry of extensions": (b"\x82\x01.", "unregistered"),
    "data outside": (b"P1\n.", "outside itself"),
    "nothing": (b"", "EOFError"),
}


@pytest.mark.parametrize("case", [one for one in HUNGRY if "2^60 steps" not in one])
def test_pickles_that_hang_crash_or_fill_the_memory(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    """They end a child at most: this process reads none of them."""
    data, message = HUNGRY[case]
    with pytest.raises(Refused) as refused:
        Pickle(data, {}).loaded()
    assert message in str(refused.value) and str(refused.value).isprintable()
    assert capfd.readouterr() == ("", "")


def test_many_pickles_are_tried_in_one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = []
    real = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or real())
    sound, foreign, deadly = (
        pickle.dumps([1]),
        pickle.dumps(_Call(os.system, "touch HIT")),
        HUNGRY["a set of 2^60 steps"][0],
    )
    given = [Pickle(data, {}).checked for data in (*[sound] * 1000, foreign, sound, deadly, foreign)]
    problems = try_all(given, 10_000)
    assert sorted(problems) == [1000, 1002] and len(forks) == 1
    assert "system" in problems[1000] and "takes more than 3 s" in problems[1002]
    assert try_all([], 0) == {}


@settings(max_examples=20)
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
