"""Write files atomically, and open files that others wrote.

A reader sees the old file or the new one, never a part of it. What comes from outside may be anything: a pipe
without a writer blocks the process that opens it, and a link to /dev/zero never ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
#: Bytes read per call.
_BLOCK = 1 << 20
#: First bytes of a file, in which a command knows its own.
_SIGNED = 512
#: Bytes of the longest name that gets a suffix as it is: file systems have 255.
_LONG = 200
_KINDS = {
    **{stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"},
    **{stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device"},
}


class Unreadable(ValueError):
    """A file that must not be read. The message begins with its path; `reason` is the rest."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{os.fspath(path)}: {reason}")


def open_outside(path: Path | str, *, limit: int | None = None) -> BinaryIO:
    """Open a file that this program did not just write. Links are followed.

    Only regular files are opened, so that opening never blocks, reading ends, and no device is touched.
    """
    if "\0" in os.fspath(path):
        raise Unreadable(repr(os.fspath(path)), "a path cannot have a null byte")
    _check_regular(os.stat(path), path, limit)
    # A pipe that takes the file's place in between does not block either.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(descriptor), path, limit)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_outside(path: Path | str, *, limit: int) -> bytes:
    """Read a whole file of at most `limit` bytes that this program did not just write."""
    with open_outside(path, limit=limit) as file:
        parts = [file.read(os.fstat(file.fileno()).st_size)]
        length = len(parts[0])
        # A file can grow, and files of /proc state no size.
        while block := file.read(_BLOCK):
            parts.append(block)
            length += len(block)
            _check_length(length, path, limit)
    return b"".join(parts)


def json_outside(path: Path | str, *, limit: int) -> Any:
    """Read a JSON file of at most `limit` bytes that this program did not just write."""
    data = read_outside(path, limit=limit)
    try:
        return json.loads(data)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None


def _check_regular(found: os.stat_result, path: Path | str, limit: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")
        raise Unreadable(path, f"it is {kind}, not a regular file")
    if limit is not None:
        _check_length(found.st_size, path, limit)


def _check_length(length: int, path: Path | str, limit: int) -> None:
    if length > limit:
        raise Unreadable(path, f"it is longer than {limit:,} bytes, the most that is read of such a file")


def printable(text: str, but: str = "") -> str:
    """Escape control characters, which could move the cursor or rewrite a terminal; keep those of `but`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in but else repr(char)[1:-1] for char in text)


def not_writable(folder: Path) -> Path | None:
    """The folder, or what is there in its place, if files cannot be made in it by this user; else None."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    return None if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else place


def require_output(path: Path, option: str, sign: bytes) -> None:
    """Raise unless the file `path` can be written; for calls before long work.

    A file that is there is replaced only if it has `sign` in its first bytes, as what the command writes has.
    """
    folder, given = path.absolute().parent, f"{option} {path}"
    if path.is_dir():
        raise ValueError(f"{given} is a folder: give the name of a file")
    if path.is_symlink():
        raise ValueError(f"{given} is a link, which the file would replace: give {os.path.realpath(path)}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{given} is not a regular file: give another name")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if sign not in file.read(_SIGNED):
                raise ValueError(f"{given} is a file that this command did not write: give another name")
    if not folder.is_dir():
        raise ValueError(f"{given}: {folder} is not a folder: mkdir -p {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=temporary_prefix("")):
            pass
    except OSError as problem:
        raise ValueError(f"{given}: no file can be made in {folder}: {problem.strerror}") from None


def require_plot(path: Path, option: str, sign: bytes) -> None:
    """`require_output` for a picture, which also needs matplotlib."""
    require_output(path, option, sign)
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; when the block ends, flush it to disk and rename it.

    If the block raises or is interrupted, the temporary file is removed and `path` is unchanged.
    """
    temporary = path.with_name(f"{temporary_prefix(path.name)}-{os.getpid()}")
    try:
        with _explain_full_disk(path.parent, [path]):
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)


@contextlib.contextmanager
def atomic_group(*paths: Path) -> Iterator[list[Path]]:
    """Like `atomic` for files that belong together; all lie in one folder, which is created.

    The last file marks the group as complete: it is removed before the first file is replaced, and it is
    renamed last. A reader that sees it therefore sees files of one group. If a rename fails, none of the
    files is left.
    """
    folder = paths[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder))
    try:
        with _explain_full_disk(folder, paths):
            temporaries = [staging / path.name for path in paths]
            yield temporaries
            for temporary in temporaries:
                _sync(temporary)
            paths[-1].unlink(missing_ok=True)
            _move_all(temporaries, paths)
            sync_folder(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def first_repeated(pairs: Sequence[tuple[str, Any]]) -> str | None:
    """Return the first key of a JSON object that is there more than once; json keeps its last value."""
    return next((name for name, count in Counter(name for name, _ in pairs).items() if count > 1), None)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically, without translation of newlines."""
    write_bytes(path, text.encode())


def write_json(path: Path, data: Any, indent: int | None = 1) -> None:
    """Write a JSON file atomically, with a newline at its end."""
    write_text(path, json.dumps(data, indent=indent) + "\n")


def temporary_prefix(name: str) -> str:
    """The beginning of the names of `atomic`'s temporary files for a file `name`."""
    return f".{short_name(name)}.part"


def short_name(name: str) -> str:
    """`name`, or of a long one its beginning and a digest, so that a suffix fits."""
    data = os.fsencode(name)
    if len(data) <= _LONG:
        return name
    return f"{data[: _LONG - 16].decode(errors='ignore')}{hashlib.sha256(data).hexdigest()[:16]}"


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk so that renames in it survive a power failure."""
    with contextlib.suppress(OSError):  # some file systems do not support fsync of a folder
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_all(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    moved: list[Path] = []
    try:
        for source, target in zip(sources, targets, strict=True):
            os.replace(source, target)
            moved.append(target)
    except OSError:
        for target in moved:
            target.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _explain_full_disk(folder: Path, paths: Sequence[Path]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        free, names = shutil.disk_usage(folder).free / 1e6, ", ".join(path.name for path in paths)
        what = f"{os.strerror(error.errno)} while writing {names} ({free:.0f} MB free)"
        cure = "no incomplete file was left: free some space or choose another folder"
        raise OSError(error.errno, f"{what}; {cure}", str(folder)) from error
