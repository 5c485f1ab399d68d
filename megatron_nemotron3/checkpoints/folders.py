"""Checkpoint folders: what a folder is, the tracker, and space for the next checkpoint.

RUN/checkpoints/                         DIR, in what `nemotron3 train --output RUN` wrote
DIR/latest_checkpointed_iteration.txt    the tracker: "300" or "release"; written last, but not atomically
DIR/iter_0000300/  DIR/release/          __0_0.distcp …  .metadata  metadata.json
HF/                                      config.json  model.safetensors, or an index and several files
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_nemotron3.checkpoints.tokenizer_file import require_bounded
from megatron_nemotron3.common.files import Unreadable, open_outside, write_text
from megatron_nemotron3.common.parser import first_missing, not_installed

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
#: Folder inside a checkpoint in which Megatron's main, and Megatron-Bridge, save the tokenizer's files.
TOKENIZER = "tokenizer"
#: Folder inside a release checkpoint, or a run, with what is kept of the Hugging Face folder it comes from.
HUGGING_FACE = "hugging_face"
#: Folder of the checkpoints in the output folder of `nemotron3 train`.
CHECKPOINTS = "checkpoints"
#: File beside what a conversion wrote: its files, and a CRC32 of each.
MANIFEST = "nemotron3_manifest.json"
#: Files of a Hugging Face folder.
HF_CONFIG, HF_INDEX, HF_SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_ITERATION = re.compile(r"iter_(\d{7,})")
_READINGS = {
    "run": "a run",
    "checkpoints": "Megatron's checkpoints",
    "checkpoint": "a Megatron checkpoint",
    "hugging face": "a Hugging Face checkpoint",
}
#: Kind -> names that only a folder of this kind has. config.json is not one: Megatron's folders may have it.
_EVIDENCE = (
    ("checkpoints", _ITERATION),
    ("checkpoints", re.compile(rf"{RELEASE}|{re.escape(TRACKER)}")),
    ("checkpoint", re.compile(r"metadata\.json|\.metadata|common\.pt|.*\.distcp|mp_rank_\d.*")),
    ("hugging face", re.compile(rf"{re.escape(HF_INDEX)}|.*\.safetensors")),
)
#: Longest file of a tokenizer, in bytes.
TOKENIZER_LIMIT = 256 << 20
#: Files of which a tokenizer's folder has at least one.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
#: Largest number of folders that a message names.
_NAMED = 5


@dataclass(frozen=True)
class Located:
    """What a folder is.

    Attributes:
        kind: "checkpoints" (Megatron's, with the tracker), "checkpoint" (one of them), or "hugging face".
        folder: the folder of that kind: the given one, or the `checkpoints` inside it.
        run: the output folder of `nemotron3 train` that it lies in.
    """

    kind: Literal["checkpoints", "checkpoint", "hugging face"]
    folder: Path
    run: Path | None = None


def locate(folder: Path) -> Located:
    """Say what a folder is: a run, its checkpoints, one checkpoint of Megatron, or one of Hugging Face.

    Only names are looked at: whether a checkpoint is complete is the reader's question.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: " + ("it is not a folder" if folder.exists() else "it does not exist"))
    inside, found = folder / CHECKPOINTS, _readings(folder)
    if inside.is_dir() and (_readings(inside) or not found):
        found["run"] = f"{CHECKPOINTS}/"
    if len(found) > 1:
        what = " and ".join(f"{_READINGS[kind]} ({evidence})" for kind, evidence in found.items())
        raise ValueError(f"{folder}: it holds {what}: give one of them, in a folder of its own")
    above = folder.absolute()
    if "run" in found:
        if not (kinds := _readings(inside)):
            raise ValueError(f"{inside}: no checkpoint has been saved there yet")
        if list(kinds) != ["checkpoints"]:
            return locate(inside)
        return Located("checkpoints", inside, folder)
    if "checkpoints" in found:
        return Located("checkpoints", folder, above.parent if above.name == CHECKPOINTS else None)
    bare = not found and not os.path.lexists(folder / HF_CONFIG)
    if "checkpoint" in found or (bare and _ITERATION.fullmatch(above.name)):
        return Located(
            "checkpoint", folder, above.parent.parent if above.parent.name == CHECKPOINTS else None
        )
    if found or os.path.lexists(folder / HF_CONFIG):
        return Located("hugging face", folder)
    raise ValueError(
        f"{folder}: there is no checkpoint in it: give the folder of a run, Megatron's or Hugging Face's"
        + _checkpoints_below(folder)
    )


def require_tokenizer(folder: str | Path) -> None:
    """Raise ValueError unless a folder may hold a Hugging Face tokenizer, and the library is installed."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"--tokenizer {folder} is {'a file' if path.exists() else 'missing'}: give a folder")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"--tokenizer {folder} holds no tokenizer: it has none of {', '.join(TOKENIZER_FILES)}"
        )
    require_small_files(path)
    if first_missing("tokenizers"):  # where transformers ends in a NameError
        raise ValueError(not_installed("tokenizers"))
    if (path / TOKENIZER_FILES[0]).is_file():
        require_bounded(path / TOKENIZER_FILES[0])


def require_small_files(folder: Path) -> None:
    """Raise ValueError if a file that a tokenizer is read from is longer than any of them."""
    for file in folder.iterdir():
        if file.suffix in (".json", ".model", ".jinja", ".txt") and file.is_file():
            open_outside(file, limit=TOKENIZER_LIMIT).close()


def locate_one(folder: Path, iteration: int | None = None) -> Located:
    """Locate one checkpoint: that of `iteration`, or the one that the tracker names."""
    found = locate(folder)
    if found.kind != "checkpoints":
        if iteration is not None:
            raise ValueError(f"{folder}: it is a single checkpoint: leave out --iteration")
        return found
    place, there = found.folder, iterations(found.folder)
    which: int | str | None = iteration
    if iteration is not None and iteration not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise ValueError(f"{place}: there is no iteration {iteration}; there are: {listed}")
    if which is None:
        try:
            which = read_tracker(place)
        except ValueError as problem:
            raise ValueError(f"{place / TRACKER}: it {problem}: give --iteration") from None
    if which is None:
        raise ValueError(f"{place}: {TRACKER} is missing: give --iteration, one of {there}")
    return Located("checkpoint", checkpoint_path(place, which), found.run)


def run_of(folder: Path) -> Path:
    """Return the run that a checkpoint, or the folder of its checkpoints, lies in; otherwise `folder`."""
    try:
        return locate(folder).run or folder
    except (ValueError, OSError):
        return folder


def is_hugging_face(folder: Path) -> bool:
    """Whether `locate` takes a folder for a Hugging Face checkpoint."""
    try:
        return locate(folder).kind == "hugging face"
    except (ValueError, OSError):
        return False


def _readings(folder: Path) -> dict[str, str]:
    """Return what the files of a folder make it (a key of `_READINGS`), with the name that says so."""
    names = sorted(os.listdir(folder))
    found: dict[str, str] = {}
    for kind, pattern in _EVIDENCE:
        first = next((name for name in names if pattern.fullmatch(name)), None)
        if first is not None:
            found.setdefault(kind, first)
    return found


def _checkpoints_below(folder: Path) -> str:
    found = []
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            if path.is_dir() and (_readings(path) or (path / CHECKPOINTS).is_dir()):
                found.append(str(path))
    more = ", …" if len(found) > _NAMED else ""
    return f"; below it are {', '.join(found[:_NAMED])}{more}" if found else ""


def read_tracker(folder: Path, patience: float = 0.0) -> int | str | None:
    """Read the tracker: an iteration, "release", or None if there is no tracker.

    A training writes it in two steps, empty and then the iteration: `patience` seconds may lie between them.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError):
            return read_tracker(folder)
        time.sleep(0.05)
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


def named_checkpoint(folder: Path) -> int | str | None:
    """Return what the tracker names; None if it names nothing, or cannot be read."""
    with contextlib.suppress(ValueError):
        return read_tracker(folder)
    return None


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration that the tracker names; None if it names none."""
    found = named_checkpoint(folder)
    return found if isinstance(found, int) else None


def write_tracker(folder: Path, which: int | str) -> None:
    """Write an iteration, or "release", to the tracker atomically; a tracker that is a symlink stays one."""
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


def iteration_of(name: str) -> int | None:
    """Return the iteration that a folder's name states."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


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
    """Check that a checkpoint of `need` bytes fits on the disk of `folder`, which may not exist yet."""
    free = free_bytes(folder)
    if free < need:
        raise ValueError(
            f"{os.fspath(folder)}: a checkpoint needs {need / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB are "
            "free: choose another --output"
        )
