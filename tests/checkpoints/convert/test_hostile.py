"""Hostile and broken folders: each gives one clear line, exit code 2, and no output folder.

Pickles (`.metadata`, common.pt) have tests of their own in tests/checkpoints; headers in
test_hf_folder.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.models import get, tiny
from tests.support.hf_folders import write_hf

SUPER = tiny(get("super"))
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `hf`, and a folder `megatron` converted from it."""
    folder = tmp_path_factory.mktemp("sound")
    write_hf(folder / "hf", SUPER, files=2)
    assert (
        cli.main(["convert", "from-hf", str(folder / "hf"), str(folder / "megatron"), "--workers", "1"]) == 0
    )
    return folder


def _refused(way: str, source: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a conversion that must fail; return its message. The target must not exist."""
    target = source.parent / "out"
    capsys.readouterr()
    assert cli.main(["convert", way, str(source), str(target), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and "Traceback" not in error
    assert not target.exists()
    return error


def _edit(path: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def _somewhere(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        _edit(folder / INDEX, lambda d: d["weight_map"].update({"lm_head.weight": name}))

    return change


def _truncate(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def _link(folder: Path, name: str, target: Path) -> None:
    (folder / name).rename(target)
    (folder / name).symlink_to(target)


FIRST = "model-00001-of-00002.safetensors"
HF: dict[str, tuple[Callable[[Path], None], str]] = {
    "index leads up": (_somewhere("../hf/" + FIRST), "expected the plain name"),
    "index is absolute": (_somewhere("/etc/passwd"), "expected the plain name"),
    "index names another kind": (_somewhere("model.bin"), "expected the plain name"),
    "index names a null byte": (_somewhere("a\0b.safetensors"), "null byte"),
    "index names nothing": (_somewhere("model-9.safetensors"), "No such file"),
    "index names a number": (_somewhere(7), "expected the plain name"),  # type: ignore[arg-type]
    "index has more": (
        lambda f: _edit(f / INDEX, lambda d: d["weight_map"].update({"extra": FIRST})),
        "1 tensors are in no file, first 'extra'",
    ),
    "index has less": (
        lambda f: _edit(f / INDEX, lambda d: d["weight_map"].pop("lm_head.weight")),
        "holds 'lm_head.weight', which",
    ),
    "index is a list": (lambda f: (f / INDEX).write_text("[]") and None, "not an object"),
    "index is empty": (lambda f: (f / INDEX).write_text("") and None, "it is not JSON"),
    "index is deep": (lambda f: (f / INDEX).write_text("[" * 10**6) and None, "it is not JSON"),
    "index is huge": (lambda f: os.truncate(f / INDEX, 100 << 20), "longer than 67,108,864 bytes"),
    "config is gone": (lambda f: (f / "config.json").unlink(), "No such file"),
    "config is a folder": (
        lambda f: _replace(f / "config.json", Path.mkdir),
        "Is a dir",
    ),
    "config has strange numbers": (
        lambda f: _edit(f / "config.json", lambda d: d.update(hidden_size=-1)),
        "not a whole number above 0",
    ),
    "config asks for the impossible": (
        lambda f: _edit(f / "config.json", lambda d: d.update(hidden_size=10**30)),
        "hidden_size=1000000.*: give a positive number below",
    ),
    "config has 10^9 experts": (
        lambda f: _edit(f / "config.json", lambda d: d.update(n_routed_experts=10**9)),
        "1,000,000,000 experts",
    ),
    "config has 10^9 MTP blocks": (
        lambda f: _edit(
            f / "config.json", lambda d: d.update(num_nextn_predict_layers=10**9, megatron_nemotron3={})
        ),
        "2,000,000,012 layers",
    ),
    "file is cut": (lambda f: _truncate(f / FIRST, 1), "its tensors end at byte"),
    "file is a link elsewhere": (lambda f: _link(f, FIRST, f.parent / "elsewhere"), "it is a link to"),
    "file is a pipe": (lambda f: _replace(f / FIRST, os.mkfifo), "not a regular file"),
    "file is a device": (
        lambda f: _replace(f / FIRST, lambda p: p.symlink_to("/dev/zero")),
        "not a regular file",
    ),
    "file is a loop": (
        lambda f: _replace(f / FIRST, lambda p: p.symlink_to(p)),
        "symbolic links",
    ),
}


@pytest.mark.parametrize("case", HF)
def test_hugging_face(sound: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(sound / "hf", tmp_path / "hf")
    change, message = HF[case]
    change(tmp_path / "hf")
    error = _refused("from-hf", tmp_path / "hf", capsys)
    assert re.search(message, error), error


def test_links_in_a_hub_cache_are_followed(sound: Path, tmp_path: Path) -> None:
    """models--x/snapshots/REVISION/FILE -> ../../blobs/HASH"""
    snapshot = tmp_path / "models--x/snapshots/0123"
    blobs = tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate((sound / "hf").iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert cli.main(["convert", "from-hf", str(snapshot), str(tmp_path / "out"), "--workers", "1"]) == 0


class _Evil:
    """Runs a command if its pickle is loaded by the pickle module."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def _torch_save(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


RELEASE = "release"
MEGATRON: dict[str, tuple[Callable[[Path], None], str]] = {
    "index runs a command": (
        lambda f: (f / RELEASE / ".metadata").write_bytes(pickle.dumps(_Evil(f / "mark"))) and None,
        "posix.system, which no checkpoint needs",
    ),
    "common.pt runs a command": (
        # 0.19's own object comes first; without it common.pt is read.
        lambda f: (f / RELEASE / "common.pt").write_bytes(_torch_save({"args": _Evil(f / "mark")})) and None,
        "posix.system|converted",
    ),
    "file is cut": (lambda f: _truncate(f / RELEASE / "__0_0.distcp", 5000), "cut off are"),
    "file is gone": (lambda f: (f / RELEASE / "__0_0.distcp").unlink(), "No such file"),
    "file is a link elsewhere": (
        lambda f: _link(f / RELEASE, "__0_0.distcp", f.parent / "elsewhere"),
        "it is a link to",
    ),
    "file is zeros": (
        lambda f: (
            (f / RELEASE / "__0_0.distcp").write_bytes(bytes((f / RELEASE / "__0_0.distcp").stat().st_size))
            and None
        ),
        "archive|directory|end",
    ),
    "index is empty": (lambda f: os.truncate(f / RELEASE / ".metadata", 0), "the file is empty"),
    "index is cut": (lambda f: _truncate(f / RELEASE / ".metadata", 9), "pickle|damaged|opcode"),
    "save was not finished": (lambda f: (f / RELEASE / "metadata.json").unlink(), "a save writes it last"),
    "tracker is empty": (
        lambda f: os.truncate(f / "latest_checkpointed_iteration.txt", 0),
        "give --iteration",
    ),
    "tracker is gone": (lambda f: (f / "latest_checkpointed_iteration.txt").unlink(), "give --iteration"),
    "tracker names nothing": (
        lambda f: (f / "latest_checkpointed_iteration.txt").write_text("12") and None,
        "iter_0000012: does not exist",
    ),
}


@pytest.mark.parametrize("case", MEGATRON)
def test_megatron(sound: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(sound / "megatron", tmp_path / "megatron")
    change, message = MEGATRON[case]
    change(tmp_path / "megatron")
    if (
        "converted" in message
        and cli.main(["convert", "to-hf", str(tmp_path / "megatron"), str(tmp_path / "o")]) == 0
    ):
        assert not (tmp_path / "megatron/mark").exists()  # it was not needed, and not opened
        return
    error = _refused("to-hf", tmp_path / "megatron", capsys)
    assert re.search(message, error), error
    assert not (tmp_path / "megatron/mark").exists()


def test_a_manifest_that_leads_out(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(sound / "megatron", tmp_path / "copy")
    path = tmp_path / "copy/nemotron3_manifest.json"
    _edit(path, lambda d: d["files"].update({"../../etc/passwd": {"bytes": 1, "crc32": "0"}}))
    assert cli.main(["verify", str(tmp_path / "copy"), "--workers", "1"]) == 1
    assert "not an entry of a file below the folder" in capsys.readouterr().out
