"""`nemotron3 check` reports every kind of damage with exit code 2 and a line that names the file."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_metadata
from megatron_nemotron3.checkpoints.structure import check_integrity, check_structure
from megatron_nemotron3.common import lock
from tests.support import checkpoint_writer as writer
from tests.support.checkpoint_reading import read_rows

FILES = [".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"]
DATA = FILES[2:]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return writer.write(tmp_path_factory.mktemp("check") / "iter_0000004", writer.tensors(), 4)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / sound.name))


def _check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["check", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, out, err


@pytest.mark.parametrize("words", [(), ("--full",), ("--full", "--workers", "1")])
def test_a_sound_checkpoint(folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _check(capsys, str(folder), *words)
    assert (status, err) == (0, "") and out.endswith("sound\n")
    assert "iteration    4" in out and "written with TP2 on 2 ranks" in out
    chunks = sum(len(tensor.chunks) for tensor in read_metadata(folder).tensors.values())
    assert chunks > 15 and f"tensors      9 in {chunks} chunks" in out
    assert ("CRC32 of" in out) == bool(words)


def test_only_a_rest_is_called_optimizer_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.ones(3, 5)
    content = {"w": weight, "optimizer.state.exp_avg.w": weight}
    lines = []
    for name in ("iter_0000001", "iter_0000002"):
        writer.write(tmp_path / name, content, 1)
        _, out, _ = _check(capsys, str(tmp_path / name))
        lines += [line.split("  ")[-1].strip() for line in out.splitlines() if "of these" in line]
        content = {"w": weight}
    said = "15 elements are the model's"
    assert lines == [f"{said}, the rest is optimizer state", said]


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document says what the lines say; of a damaged checkpoint, too."""
    status, out, err = _check(capsys, str(folder), "--full", "--json")
    facts = json.loads(out)
    assert (status, err) == (0, "") and facts["sound"] is True and facts["problems"] == []
    assert (facts["iteration"], facts["tensors"], facts["checked"]) == (4, 9, "bytes")
    assert facts["bytes"] == sum(path.stat().st_size for path in folder.iterdir() if path.name in DATA)
    _cut(folder / DATA[0], 0.33)
    status, out, err = _check(capsys, str(folder), "--json")
    facts = json.loads(out)
    assert status == 2 and facts["sound"] is False and DATA[0] in facts["problems"][0]
    assert facts["problems"][0] in err
    status, out, err = _check(capsys, str(folder / "none"), "--json")
    assert (status, out) == (2, "") and err.count("\n") == 1


def _cut(path: Path, keep: float) -> None:
    os.truncate(path, int(path.stat().st_size * keep) if keep < 1 else path.stat().st_size - 1)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


HARM: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: _cut(path, 0),
    "a third": lambda path: _cut(path, 0.33),
    "most": lambda path: _cut(path, 0.97),
    "all but a byte": lambda path: _cut(path, 1),
    "deleted": Path.unlink,
    "a folder": _to_folder,
    "a link to nothing": lambda path: _to_link(path, "nothing"),
    "a link to itself": lambda path: _to_link(path, path.name),
    "a device": lambda path: _to_link(path, "/dev/null"),
}


@pytest.mark.parametrize(
    ("file", "harm"),
    [*((file, harm) for file in (FILES[0], FILES[2]) for harm in HARM), (FILES[1], "empty")],
)
def test_each_harm_to_each_file_is_named(
    folder: Path, file: str, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The structural check finds it from names and sizes."""
    HARM[harm](folder / file)
    status, out, err = _check(capsys, str(folder))
    assert status == 2 and "sound" not in out
    assert f"nemotron3 check: {folder / file}: " in err


def test_a_file_in_place_of_another_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has its full length, so only the full check finds the damage."""
    data = (folder / DATA[1]).read_bytes()
    (folder / DATA[0]).write_bytes(data * 2)
    status, _, err = _check(capsys, str(folder), "--full")
    assert status == 2 and "embedding.word_embeddings.weight at byte" in err
    assert 5 < len(err.splitlines()) <= 21
    assert all(line.startswith(f"nemotron3 check: {folder / DATA[0]}: ") for line in err.splitlines())


def _changed(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


@settings(max_examples=40)
@given(data=st.data())
def test_a_flipped_bit_is_named_or_harmless(sound: Path, data: st.DataObject) -> None:
    """A flip in any file is reported, or every tensor still reads as before."""
    path = sound / data.draw(st.sampled_from([*DATA, *FILES]))
    position, bit = data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7))
    names = set(read_metadata(sound).tensors)
    _changed(path, position, bit)
    try:
        problems = _problems(sound)
        if problems:
            assert all(problem.startswith(str(path)) for problem in problems) or path.name == ".metadata"
            return
        index = read_metadata(sound)
        expected = writer.tensors()
        if path.name == ".metadata" and set(index.tensors) != names:
            # A renamed tensor cannot be detected here; Megatron reports the missing name when it loads.
            assert len(names - set(index.tensors)) == 1
            return
        for name, tensor in expected.items():
            assert writer.same_bytes(read_rows(index, name), tensor), name
    finally:
        _changed(path, position, bit)


def _problems(folder: Path) -> tuple[str, ...]:
    verdict = check_structure(folder)
    if verdict.problems or verdict.index is None:
        return verdict.problems or (f"{folder / 'metadata.json'}: {verdict.state}",)
    try:
        return check_integrity(folder, verdict.index).problems
    except CheckpointError as problem:
        return (str(problem),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.chunks.pop(0), "no chunk covers the elements at [0, 0]"),
        (lambda m: m.chunks.append(m.chunks[0]), "two positions|no position"),
        (lambda m: setattr(m, "size", torch.Size([12, 6])), "no chunk covers"),
        (lambda m: setattr(m, "size", torch.Size([11, 5])), "reaches beyond [11, 5]"),
        (lambda m: setattr(m.properties, "dtype", torch.complex128), "complex128 of shape"),
        (lambda m: setattr(m.properties, "dtype", torch.int32), "float32 of shape"),
    ],
)
def test_an_index_that_does_not_fit_its_files(
    folder: Path, change: Callable[[object], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    name = "embedding.word_embeddings.weight"
    before = {tuple(chunk.offsets) for chunk in index.state_dict_metadata[name].chunks}
    change(index.state_dict_metadata[name])
    after = {tuple(chunk.offsets) for chunk in index.state_dict_metadata[name].chunks}
    for key in [k for k in index.storage_data if k.fqn == name and tuple(k.offset) in before - after]:
        del index.storage_data[key]
    path.write_bytes(pickle.dumps(index))
    status, _, err = _check(capsys, str(folder), "--full")
    assert status == 2 and any(part in err for part in message.split("|")) and name in err


def test_archives_without_crc_are_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        other = writer.write(folder.parent / "iter_0000005", {"w": torch.ones(4, 4)}, 5)
    finally:
        torch.serialization.set_crc32_options(True)
    status, out, _ = _check(capsys, str(other), "--full")
    assert status == 0 and "4 archives were written without CRC32" in out


def test_a_manifest_of_a_conversion_that_cannot_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lies beside the checkpoint."""
    manifest = folder.parent / "nemotron3_manifest.json"
    manifest.write_text('{"files": {}}')
    assert _check(capsys, str(folder))[0] == 0
    for text, message in (('{"files": {', "it is not JSON"), ("[]", "it holds a list"), ("{}", "no files")):
        manifest.write_text(text)
        for path in (folder, folder.parent):
            status, _, err = _check(capsys, str(path))
            assert status == 2 and f"{manifest}: " in err and message in err and err.count("\n") == 1


def test_an_integrity_manifest_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's --verify-integrity also covers the index."""
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    manifest = folder / "integrity.json"
    manifest.write_text(json.dumps({"algorithm": "sha256", "files": files}))
    assert _check(capsys, str(folder), "--full")[0] == 0
    files[".metadata"] = "0" * 64
    manifest.write_text(json.dumps({"algorithm": "sha256", "files": files}))
    status, _, err = _check(capsys, str(folder), "--full")
    assert status == 2 and f"{folder / '.metadata'}: SHA-256" in err
    manifest.write_text("{")
    status, _, err = _check(capsys, str(folder), "--full")
    assert status == 2 and f"{manifest}: it is not an integrity manifest" in err


def test_the_older_form_with_common_pt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """megatron-core up to 0.18 stores the arguments in a separate file."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    del index.state_dict_metadata["common_state/shard_0_1"]
    index.storage_data = {k: v for k, v in index.storage_data.items() if k.fqn != "common_state/shard_0_1"}
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    status, _, err = _check(capsys, str(folder))
    assert status == 2 and f"{folder / 'common.pt'}: the file is missing" in err
    torch.save({"iteration": 4, "args": None, "w": torch.ones(2)}, folder / "common.pt")
    status, out, _ = _check(capsys, str(folder), "--full")
    assert status == 0 and "iteration    4" in out
    _changed(folder / "common.pt", (folder / "common.pt").stat().st_size // 12, 1)
    status, _, err = _check(capsys, str(folder), "--full")
    assert status == 2 and f"{folder / 'common.pt'}: " in err


def test_a_folder_of_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = folder.parent
    tracker = root / writer.TRACKER
    status, _, err = _check(capsys, str(root))
    assert status == 2 and f"{tracker}: the file is missing" in err and "write 4 into it" in err
    tracker.write_text("4")
    unfinished = Path(shutil.copytree(folder, root / "iter_0000006"))
    (unfinished / "metadata.json").unlink()
    status, out, err = _check(capsys, str(root))
    assert (status, err) == (0, "") and "iter_0000006 unfinished" in out and "names 4" in out
    tracker.write_text("")
    status, _, err = _check(capsys, str(root))
    assert status == 2 and f"{tracker}: it is empty" in err and "write 4 into it" in err
    tracker.write_text("6")
    status, _, err = _check(capsys, str(root))
    assert status == 2 and f"{unfinished / 'metadata.json'}: the file is missing" in err


@pytest.mark.parametrize("missing", ["metadata.json", ""])
def test_a_release_without_a_tracker(
    sound: Path, tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron does not find it, whether it is complete or not."""
    release = Path(shutil.copytree(sound, tmp_path / folders.RELEASE))
    state, cure = "complete", "write release into it"
    if missing:
        (release / missing).unlink()
        state, cure = "unfinished", "no checkpoint here is known to be complete"
    status, out, err = _check(capsys, str(tmp_path))
    assert status == 2 and f"release {state}" in out
    assert f"{tmp_path / writer.TRACKER}: the file is missing; {cure}" in err
    (tmp_path / writer.TRACKER).write_text("release")
    assert _check(capsys, str(tmp_path))[0] == (2 if missing else 0)


@pytest.mark.parametrize(
    "words", [("/nowhere",), (os.fspath(Path(__file__)),), (os.fspath(Path(__file__).parent),)]
)
def test_no_checkpoint_there(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _check(capsys, *words)
    assert status == 2 and out == "" and words[0] in err and len(err.splitlines()) == 1


def test_a_checkpoint_that_is_being_saved_is_not_damaged(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running training holds the folder: what it has not finished is not a problem, and nothing changes."""
    shutil.copytree(sound, tmp_path / "iter_0000004")
    shutil.copytree(sound, tmp_path / "iter_0000008")
    (tmp_path / "iter_0000008" / "metadata.json").unlink()  # written last
    (tmp_path / folders.TRACKER).write_text("4")
    with lock.held(tmp_path, "nemotron3 train super"):
        status, out, err = _check(capsys, str(tmp_path))
        assert (status, err) == (0, "") and out.endswith("sound\n")
        assert f"iter_0000008 is being written by {os.getpid()} on " in out and "nemotron3 train super" in out
        status, _, err = _check(capsys, str(tmp_path / "iter_0000008"))
        assert status == 2 and "is being written by" in err and len(err.splitlines()) == 1
        # The tracker is empty for a moment while it is written.
        (tmp_path / folders.TRACKER).write_text("")
        threading.Timer(0.3, (tmp_path / folders.TRACKER).write_text, ["4"]).start()
        assert _check(capsys, str(tmp_path))[0] == 0
    status, out, _ = _check(capsys, str(tmp_path))
    assert status == 0 and "iter_0000008 unfinished" in out
