"""Checkpoint folders as Megatron writes them: their names, the tracker, and space for the next checkpoint.

DIR/latest_checkpointed_iteration.txt    the tracker: "300" or "release"; written last, but not atomically
DIR/iter_0000300/  __0_0.distcp …  .metadata  metadata.json
DIR/release/       the same files; weights to start from
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from megatron_nemotron3.checkpoint.files import Unreadable, open_outside, write_text

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")


def read_tracker(folder: Path) -> int | str | None:
    """Read the tracker: an iteration, "release", or None if there is no tracker.

    Raises:
        ValueError: the tracker is unreadable or names no iteration. The message continues "the tracker …".
    """
    try:
        with open_outside(folder / TRACKER) as file:
            data = file.read(4096)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise ValueError(f"cannot be read ({problem.strerror})") from None
    except Unreadable as problem:
        raise ValueError(f"cannot be read ({problem.reason})") from None
    if not data.strip():
        raise ValueError(f"is empty ({len(data)} bytes)")
    # Megatron reads it the same way: int() of the stripped text.
    text = data.decode("utf-8", "replace").strip()
    if text == RELEASE:
        return RELEASE
    with contextlib.suppress(ValueError):
        if (iteration := int(text)) >= 0:
            return iteration
    raise ValueError(f"holds {text[:40]!r}, which is not an iteration")


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration that the tracker names; None if it names none."""
    try:
        found = read_tracker(folder)
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def write_tracker(folder: Path, which: int | str) -> None:
    """Write an iteration, or "release", to the tracker atomically; a tracker that is a symlink stays one.

    Raises:
        OSError: the folder cannot be written, or the tracker is neither missing nor a regular file.
    """
    path = Path(os.path.realpath(folder / TRACKER))
    if path.exists() and not path.is_file():  # a link to a device would replace the device
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    write_text(path, str(which))


def checkpoint_path(folder: Path, which: int | str) -> Path:
    """Return the folder of an iteration, or of "release"."""
    return folder / (which if isinstance(which, str) else f"iter_{which:07d}")


def iterations(folder: Path) -> list[int]:
    """List the iterations that have a folder, complete or not, newest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (match for name in names if (match := _ITERATION.fullmatch(name)))
    return sorted((int(match[1]) for match in found if (folder / match[0]).is_dir()), reverse=True)


def bytes_needed(parameters: int, precision: str) -> int:
    """Size of one checkpoint: weights, FP32 Adam moments, and FP32 masters unless the weights are FP32."""
    per_parameter = 4 + 4 + 4 if precision == "fp32" else 2 + 4 + 4 + 4
    return parameters * per_parameter


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of `folder`, which may not exist yet."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def check_room(folder: Path, need: int) -> None:
    """Check that a checkpoint of `need` bytes fits on the disk of `folder`, which may not exist yet.

    Raises:
        ValueError: less space is free.
    """
    free = free_bytes(folder)
    if free < need:
        raise ValueError(
            f"{os.fspath(folder)}: a checkpoint needs {need / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB are "
            "free: choose another --output"
        )
