"""Is a checkpoint folder complete? Names and sizes only, so it is quick at any size."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from megatron_nemotron3.checkpoint.metadata import (
    COMMON,
    INDEX,
    ITEM_SIZE,
    CheckpointError,
    CheckpointIndex,
    read_metadata,
)
from megatron_nemotron3.checkpoint.tiling import tiling_problem

CONFIG = "metadata.json"
#: Problems named at most.
_LIMIT = 50

State = Literal["complete", "unfinished", "damaged", "legacy", "foreign"]


@dataclass(frozen=True)
class Verdict:
    """What a structural check found.

    complete    every file is there with the size it needs
    unfinished  what a save writes last is missing
    damaged     it had been finished, but a file is missing, short or unreadable
    legacy      mp_rank_… folders, which do not say what belongs to them
    foreign     metadata.json names a format that is not checked here, and there is no index
    """

    state: State
    #: Each begins with the path of a file.
    problems: tuple[str, ...] = ()
    index: CheckpointIndex | None = None


def judge(folder: Path) -> Verdict:
    """The structural check of one checkpoint folder; opens no data file.

    Checked are: metadata.json; the index; every file it names, with the size it needs; chunks that tile
    their tensor with no gap and no overlap and are long enough for their elements; common.pt where the
    index has no common state.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        return Verdict("unfinished", (f"{folder}: {what}",))
    if not os.path.lexists(folder / CONFIG):
        if next(folder.glob("mp_rank_0*"), None) is not None:
            return Verdict("legacy", tuple(_legacy_problems(folder)))
        missing = f"{folder / CONFIG}: the file is missing; a save writes it last"
        if not (folder / INDEX).is_file():
            return Verdict("unfinished", (missing,))
    else:
        try:
            if (folder / CONFIG).is_file() and (folder / CONFIG).stat().st_size == 0:
                return Verdict(
                    "unfinished", (f"{folder / CONFIG}: the file is empty; a save writes it last",)
                )
            if _backend(folder / CONFIG) != "torch_dist" and not os.path.lexists(folder / INDEX):
                return Verdict("foreign")
        except CheckpointError as problem:
            return Verdict("damaged", (str(problem),))
        missing = ""
    try:
        index = read_metadata(folder)
    except CheckpointError as problem:
        return Verdict("unfinished" if missing else "damaged", (missing or str(problem),))
    if missing and (index.common_state or (folder / COMMON).exists()):
        return Verdict("unfinished", (missing,))
    # Without metadata.json it is a format of torch itself (torch_dcp, fsdp_dtensor): the index comes last.
    problems = (*islice(_file_problems(index), _LIMIT), *islice(_tensor_problems(index), _LIMIT))
    if not missing and index.common_state is None and not (folder / COMMON).is_file():
        path = folder / COMMON
        problems += (f"{path}: the file is missing, and {INDEX} has no common_state in its place",)
    return Verdict("damaged" if problems else "complete", problems, index)


def _backend(path: Path) -> str:
    """`sharded_backend` of a metadata.json."""
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    try:
        return str(json.loads(data)["sharded_backend"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f'{path}: {data[:60]!r} is not {{"sharded_backend": …}}') from None


def _file_problems(index: CheckpointIndex) -> Iterator[str]:
    for name, need in index.files.items():
        path = index.folder / name
        try:
            found = path.stat()
        except OSError as problem:
            users = _users(index, name, 0)
            yield f"{path}: {problem.strerror}; it holds {users}"
            continue
        if not stat.S_ISREG(found.st_mode):
            yield f"{path}: it is not a regular file"
        elif found.st_size < need:
            users = _users(index, name, found.st_size)
            yield f"{path}: {found.st_size:,} bytes, but {need:,} are needed: cut off are {users}"


def _users(index: CheckpointIndex, file: str, size: int) -> str:
    """What of `file` reaches beyond `size`, in words."""
    tensors = [
        name
        for name, tensor in index.tensors.items()
        if any(c.file == file and c.offset + c.length > size for c in tensor.chunks)
    ]
    names = tensors + [k for k, o in index.objects.items() if o.file == file and o.offset + o.length > size]
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _tensor_problems(index: CheckpointIndex) -> Iterator[str]:
    path = index.folder / INDEX
    for name, tensor in index.tensors.items():
        boxes = ((chunk.offsets, chunk.sizes) for chunk in tensor.chunks)
        if problem := tiling_problem(tensor.shape, boxes):
            yield f"{path}: {name}: {problem}"
            continue
        for chunk in tensor.chunks:
            need = math.prod(chunk.sizes) * ITEM_SIZE[tensor.dtype]
            if chunk.length < need:
                yield (
                    f"{path}: {name} at {list(chunk.offsets)} of shape {list(chunk.sizes)} in "
                    f"{tensor.dtype} needs {need:,} bytes, {chunk.length:,} are given"
                )


def legacy_files(folder: Path) -> list[Path]:
    """The torch.save files of a legacy checkpoint."""
    return sorted(folder.glob("mp_rank_*/*.pt"))


def _legacy_problems(folder: Path) -> Iterator[str]:
    for place in sorted(folder.glob("mp_rank_*")):
        files = sorted(place.glob("*.pt"))
        if not (place / "model_optim_rng.pt").exists():
            yield f"{place / 'model_optim_rng.pt'}: the file is missing"
        for path in files:
            if not path.is_file() or path.stat().st_size == 0:
                yield f"{path}: the file is empty or no regular file"
