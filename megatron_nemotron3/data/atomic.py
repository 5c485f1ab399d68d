"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def staged(*finals: Path) -> Iterator[list[Path]]:
    """Yield one path to write for each of `finals`; move them there, in order, if the block succeeds.

    All finals lie in one folder, which is created. With several, the last is the marker: it is removed
    before the first is replaced and appears last, so whoever sees the marker sees files of one generation.
    If the block fails, what was there before is untouched; if a move fails, none of the finals is left.

    Raises OSError (ENOSPC, EDQUOT) with the free space and the cure where the disk or the quota is full.
    """
    folder = finals[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder))
    try:
        paths = [staging / final.name for final in finals]
        yield paths
        for path in paths:
            _sync(path)
        if len(finals) > 1:
            finals[-1].unlink(missing_ok=True)
        moved: list[Path] = []
        try:
            for path, final in zip(paths, finals, strict=True):
                os.replace(path, final)
                moved.append(final)
        except OSError:
            for final in moved:
                final.unlink(missing_ok=True)
            raise
        _sync(folder)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        names = ", ".join(final.name for final in finals)
        free = shutil.disk_usage(folder).free / 1e6
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)} while writing {names} ({free:.0f} MB free); nothing was left "
            "half-written: free some space, choose another folder, or lower max_bytes",
            str(folder),
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_text(final: Path, text: str) -> None:
    """Write one UTF-8 file through `staged`."""
    with staged(final) as (path,):
        path.write_text(text, encoding="utf-8", newline="")


def _sync(path: Path) -> None:
    """fsync a file or, so that a rename survives a power cut, a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
