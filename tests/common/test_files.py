"""Atomic writes leave the new file or the old one, and no temporary files; only regular files are read."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_nemotron3.common import files


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


@pytest.mark.parametrize("name", ["n" * 250, "é" * 127, "n" * 200])
def test_a_long_name_leaves_room_for_a_suffix(name: str, tmp_path: Path) -> None:
    files.write_text(tmp_path / name, "x")
    assert os.listdir(tmp_path) == [name]
    short = files.short_name(name)
    assert len(os.fsencode(short)) <= 200 and short != files.short_name(name[:-1])
    (tmp_path / f"{short}.partial").mkdir()


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    """Whoever wrote to it would have a file beside the one that the link names."""
    (tmp_path / "file").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("file")
    with pytest.raises(ValueError, match=f"is a link, which the file would replace: give {tmp_path}/file"):
        files.require_output(link, "--output", b"")
    files.require_output(tmp_path / "file", "--output", b"old")
    (tmp_path / "empty").touch()
    files.require_output(tmp_path / "empty", "--output", b"new")
    with pytest.raises(ValueError, match=r"file is a file that this command did not write: give another"):
        files.require_output(tmp_path / "file", "--output", b"new")


def test_the_place_of_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert files.not_writable(tmp_path / "new" / "newer") is None
    assert files.not_writable(tmp_path / "file" / "new") == tmp_path / "file"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert files.not_writable(tmp_path / "new" / "newer") == tmp_path


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


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("way", [lambda p: files.open_outside(p), lambda p: files.read_outside(p, limit=9)])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "it is a pipe, not a regular file"),
        (_socket, "it is a socket, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a character device, not a regular file"),
        (lambda path: path.symlink_to("pipe"), "it is a pipe, not a regular file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: None, "No such file"),
    ],
)
def test_only_regular_files_are_opened(
    tmp_path: Path,
    make: Callable[[Path], None],
    message: str,
    way: Callable[[Path], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is at most 108 bytes long
    os.mkfifo("pipe")
    make(Path("here"))
    with pytest.raises((ValueError, OSError), match=message) as found:
        way(Path("here"))
    assert "here" in str(found.value)


def test_a_pipe_in_the_files_place_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the opening, the file is replaced."""
    pipe, regular = tmp_path / "pipe", os.stat(__file__)
    os.mkfifo(pipe)
    monkeypatch.setattr(os, "stat", lambda path: regular)
    with pytest.raises(ValueError, match="it is a pipe"):
        files.open_outside(pipe)


def test_the_length_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"123456789")
    assert files.read_outside(path, limit=9) == b"123456789"
    assert files.read_outside(str(path), limit=9) == b"123456789"
    with files.open_outside(path, limit=9) as file:
        assert file.read() == b"123456789"
    for read in (files.read_outside, files.open_outside):
        with pytest.raises(ValueError, match="a: it is longer than 8 bytes"):
            read(path, limit=8)
    os.truncate(path, 1 << 40)  # sparse
    with pytest.raises(ValueError, match="longer than 67,108,864 bytes"):
        files.read_outside(path, limit=64 << 20)
    with pytest.raises(ValueError, match="null byte"):
        files.read_outside(tmp_path / "a\0b", limit=9)


def test_a_file_that_states_no_length_is_limited() -> None:
    """Files of /proc have the size 0."""
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        files.read_outside("/proc/self/status", limit=10)


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"a": [1, "é"]})
    assert path.read_bytes() == b'{\n "a": [\n  1,\n  "\\u00e9"\n ]\n}\n'
    assert os.listdir(tmp_path) == ["a.json"]
    assert files.json_outside(path, limit=100) == {"a": [1, "é"]}
    with pytest.raises(files.Unreadable, match="longer than 8 bytes"):
        files.json_outside(path, limit=8)
    files.write_json(path, [1], indent=None)
    assert path.read_text() == "[1]\n"
    path.write_text("[" * 200_000)
    with pytest.raises((ValueError, RecursionError)):
        files.json_outside(path, limit=1 << 20)
