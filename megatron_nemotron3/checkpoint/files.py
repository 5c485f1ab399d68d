"""Write files atomically: a reader sees the old file or the new one, never a part of it.

Only the standard library is imported, so that every package can use it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; when the block ends, flush it to disk and rename it.

    If the block raises or is interrupted, the temporary file is removed and `path` is unchanged.

    Raises:
        OSError: the file cannot be written. If the disk or the quota is full, the message gives the free
            space.
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

    Raises:
        OSError: as for `atomic`.
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


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically; newlines are written as they are."""
    write_bytes(path, text.encode())


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG atomically, and close it.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib.pyplot as plt

    try:
        with atomic(path) as temporary:
            figure.savefig(temporary, format="png")
    finally:
        plt.close(figure)


def temporary_prefix(name: str) -> str:
    """How the names of temporary files begin that `atomic` makes for a file `name`."""
    return f".{name}.part"


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
        free = shutil.disk_usage(folder).free / 1e6
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)} while writing {', '.join(path.name for path in paths)} "
            f"({free:.0f} MB free); no incomplete file was left: free some space or choose another folder",
            str(folder),
        ) from error
