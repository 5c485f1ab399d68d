"""prepare(): reused when nothing changed, rebuilt when anything did, and never half there."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_nemotron3.train.data import prepare

pytest.importorskip("megatron.core")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"document {i} says {i * i}\n" * 5)
    return folder


def _prepare(source, tmp_path, **options):
    return prepare(source, tmp_path / "out", 300, **options)


def test_flags_are_complete_and_absolute(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared = prepare("source", "out", 300)
    root = Path(prepared.folder)
    assert root.parent == tmp_path / "out"
    data = ["--data-path", str(root / "corpus"), "--split", "98,2,0"]
    data += ["--data-cache-path", str(root / "cache")]
    assert prepared.flags == data + prepared.tokenizer.flags
    assert prepared.flags[-1] == str(root / "tokenizer")
    assert prepared.dataset.documents == 60 and not prepared.reused
    assert sorted(os.listdir(root)) == ["corpus.bin", "corpus.idx", "manifest.json", "tokenizer"]


def test_same_input_is_reused_without_writing(source, tmp_path):
    first = _prepare(source, tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in Path(first.folder).rglob("*")}
    os.utime(source / "0.txt", (0, 0))  # the content counts, not the date
    second = _prepare(source, tmp_path)
    assert second.reused and second.flags == first.flags and second.dataset == first.dataset
    assert {path: path.stat().st_mtime_ns for path in Path(first.folder).rglob("*")} == stamps


def test_an_index_that_was_cut_short_is_removed(source, tmp_path):
    """Megatron takes an index for complete if its files exist."""
    cache = Path(_prepare(source, tmp_path).folder) / "cache"
    cache.mkdir()
    for name in ("whole", "cut", "empty"):
        np.save(cache / f"{name}.npy", np.arange(5000))
    (cache / "cut.npy").write_bytes((cache / "cut.npy").read_bytes()[:20_000])
    (cache / "empty.npy").write_bytes(b"")
    assert _prepare(source, tmp_path).reused
    assert os.listdir(cache) == ["whole.npy"]


def test_other_input_gets_another_folder(source, tmp_path):
    prepared = [_prepare(source, tmp_path)]
    prepared.append(_prepare(source, tmp_path, max_bytes=2000))
    prepared.append(prepare(source, tmp_path / "out", 320))
    (source / "0.txt").write_text((source / "0.txt").read_text().upper())  # same size
    prepared.append(_prepare(source, tmp_path))
    assert not any(p.reused for p in prepared)
    assert len({p.prefix for p in prepared}) == len(prepared)


def test_folder_can_be_moved(source, tmp_path):
    _prepare(source, tmp_path)
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    moved = prepare(source, tmp_path / "elsewhere", 300)
    assert moved.reused
    assert all("elsewhere" in flag for flag in moved.flags if os.path.isabs(flag))
    assert moved.tokenizer.decode(moved.tokenizer.encode(["says"])[0]) == "says"


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "short .bin": lambda root: _truncate(root / "corpus.bin"),
    "no .idx": lambda root: (root / "corpus.idx").unlink(),
    "no tokenizer": lambda root: shutil.rmtree(root / "tokenizer"),
    "half a manifest": lambda root: _truncate(root / "manifest.json") or _truncate(root / "manifest.json"),
    "a list for a manifest": lambda root: (root / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_repaired(source, tmp_path, damage):
    first = _prepare(source, tmp_path)
    root = Path(first.folder)
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    (root / "cache").mkdir()
    (root / "cache" / "stale.npy").write_text("index of the damaged file")
    DAMAGE[damage](root)
    second = _prepare(source, tmp_path)
    assert not second.reused
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == files
    assert _prepare(source, tmp_path).reused


@pytest.mark.parametrize("call", range(1, 6))
def test_full_disk_at_any_move(source, tmp_path, monkeypatch, call):
    """5 files are moved into place: whichever fails, no manifest vouches for the folder."""
    original, calls = os.replace, []

    def replace(*args):
        calls.append(args)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        _prepare(source, tmp_path)
    (root,) = (tmp_path / "out").iterdir()
    assert not (root / "manifest.json").exists()
    assert (root / "corpus.bin").exists() == (root / "corpus.idx").exists()
    assert not list(root.rglob(".staging-*"))
    assert not _prepare(source, tmp_path).reused
    assert len(calls) > call


def test_split_is_checked_before_the_work(source, tmp_path):
    with pytest.raises(ValueError, match=r"--split 999,1,0 gives validation none of the 60 documents"):
        _prepare(source, tmp_path, split="999,1,0")
    (tmp_path / "one.txt").write_text("short\n")
    with pytest.raises(ValueError, match=r"1 document\(s\) cannot be split .* at least 2"):
        prepare(tmp_path / "one.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert _prepare(source, tmp_path, split="50,50,0").split == "50,50,0"
    assert _prepare(source, tmp_path).split == "98,2,0"
