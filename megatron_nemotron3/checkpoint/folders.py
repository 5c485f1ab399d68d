"""Checkpoint folders as Megatron writes them: their names, the tracker, and room for the next one.

DIR/latest_checkpointed_iteration.txt    "300", or "release"; written last, but not atomically
DIR/iter_0000300/  __0_0.distcp …  .metadata  metadata.json
DIR/release/       the same, weights to start from
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from megatron_nemotron3.checkpoint.files import write_text

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")


def tracked(folder: Path) -> int | str | None:
    """What the tracker names: an iteration, "release", or None if there is no tracker.

    Raises:
        ValueError: the tracker holds something else; the message says what.
    """
    try:
        with open(folder / TRACKER, "rb") as file:
            data = file.read(4096)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise ValueError(f"cannot be read ({problem.strerror})") from None
    if not data.strip():
        raise ValueError(f"is empty ({len(data)} bytes)")
    # As upstream reads it: int() of the stripped text.
    text = data.decode("utf-8", "replace").strip()
    if text == RELEASE:
        return RELEASE
    with contextlib.suppress(ValueError):
        if (iteration := int(text)) >= 0:
            return iteration
    raise ValueError(f"holds {text[:40]!r}, no iteration")


def latest(folder: Path) -> int | None:
    """Iteration the tracker names, None if it names none."""
    try:
        found = tracked(folder)
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def write_tracker(folder: Path, which: int | str) -> None:
    """Write an iteration, or "release", to the tracker atomically; a tracker that is a symlink stays one.

    Raises:
        OSError: the folder cannot be written.
    """
    write_text(Path(os.path.realpath(folder / TRACKER)), str(which))


def path_of(folder: Path, which: int | str) -> Path:
    """Folder of one checkpoint: of an iteration, or "release"."""
    return folder / (which if isinstance(which, str) else f"iter_{which:07d}")


def iterations(folder: Path) -> list[int]:
    """Iterations that have a folder, complete or not, newest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (match for name in names if (match := _ITERATION.fullmatch(name)))
    return sorted((int(match[1]) for match in found if (folder / match[0]).is_dir()), reverse=True)


def bytes_needed(parameters: int, precision: str) -> int:
    """Size of one checkpoint: weights, FP32 Adam moments and, unless the weights are FP32, FP32 masters."""
    per_parameter = 4 + 4 + 4 if precision == "fp32" else 2 + 4 + 4 + 4
    return parameters * per_parameter


def check_room(folder: Path, need: int) -> None:
    """Refuse before any work if a checkpoint cannot fit.

    Raises:
        ValueError: less than `need` bytes are free where `folder` is or will be.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need:
        raise ValueError(
            f"{os.fspath(folder)}: a checkpoint needs {need / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB are "
            "free: choose another --output"
        )
