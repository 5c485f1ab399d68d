"""Atomic writes leave the new file or the old one, and no temporary files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_nemotron3.checkpoint import files


def test_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("first", "sécond\r\n"):
        files.write_text(path, text)
        assert path.read_bytes() == text.encode() and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_error_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error), files.atomic(path) as temporary:
        temporary.write_text("new")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_a_full_disk_is_explained(tmp_path: Path) -> None:
    explained = pytest.raises(OSError, match=r"while writing a \(\d+ MB free\).* free some space")
    with explained, files.atomic(tmp_path / "a"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_group_is_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second rename fails, the marker is absent and so is the file that was already renamed."""
    data, marker = tmp_path / "data", tmp_path / "marker"
    for path in (data, marker):
        path.write_text("old")
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if target == marker:
            raise PermissionError("no")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PermissionError), files.atomic_group(data, marker) as temporaries:
        for temporary in temporaries:
            temporary.write_text("new")
    assert os.listdir(tmp_path) == []
