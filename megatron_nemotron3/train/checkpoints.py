"""Checkpoint folders as Megatron writes them: which is complete, and how much room the next one needs.

FOLDER/latest_checkpointed_iteration.txt    written last, so what it names is complete
FOLDER/iter_0000300/  __0_0.distcp …  metadata.json
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")


def latest(folder: Path) -> int | None:
    """Iteration of the last complete checkpoint, None if there is none."""
    try:
        return int((folder / TRACKER).read_text())
    except (FileNotFoundError, ValueError):
        return None


def path_of(folder: Path, iteration: int) -> Path:
    """Folder of one checkpoint."""
    return folder / f"iter_{iteration:07d}"


def remove_incomplete(folder: Path) -> list[Path]:
    """Delete what an interrupted save left: checkpoints newer than the last complete one. Returns them."""
    newest = latest(folder)
    removed = []
    for child in sorted(folder.glob("iter_*")):
        found = _ITERATION.fullmatch(child.name)
        if found and (newest is None or int(found[1]) > newest):
            shutil.rmtree(child)
            removed.append(child)
    return removed


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
