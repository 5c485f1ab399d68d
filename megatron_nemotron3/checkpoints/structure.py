"""Check a checkpoint folder: its structure by names and sizes, or everything by the CRC32 of every record.

torch.save writes a CRC32 with every record, but torch.load does not check it: a flipped bit in a weight
loads as another weight.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Literal

from megatron_nemotron3.checkpoints.metadata import (
    COMMON,
    INDEX,
    ITEM_SIZE,
    JSON_LIMIT,
    ArchiveError,
    CheckpointError,
    CheckpointIndex,
    StoredObject,
    TensorChunk,
    explained,
    read_file,
    read_metadata,
    regular_file_size,
)
from megatron_nemotron3.checkpoints.pickles import Refused
from megatron_nemotron3.checkpoints.read import MappedFile, chunk_layout, records

CONFIG = "metadata.json"
#: Longest metadata.json that is read, in bytes.
_CONFIG_LIMIT = 1 << 20
#: Written by Megatron with --verify-integrity: SHA-256 of every file.
MANIFEST = "integrity.json"
#: Bytes that one task of a full check reads.
_TASK_BYTES = 256 << 20
#: (name, dtype or "" for an object, position) of an archive.
_Item = tuple[str, str, StoredObject]
#: Largest number of problems reported per kind.
_LIMIT = 50
#: Why mp_rank_… folders are refused, and the cure.
_LEGACY = (
    "mp_rank_… folders (--ckpt-format torch) are not read: load them in Megatron with --ckpt-format torch "
    "--ckpt-convert-format torch_dist --ckpt-convert-save DIR, which saves DIR/torch_dist and ends"
)

State = Literal["complete", "unfinished", "damaged", "foreign"]


@dataclass(frozen=True)
class Verdict:
    """Result of the structural check.

    complete    every file exists and is large enough
    unfinished  the file that a save writes last is missing
    damaged     the save had finished, but a file is missing, too short or unreadable
    foreign     a format that is not read here: mp_rank_… folders (a problem says what to do), or the one that
                metadata.json names, without an index
    """

    state: State
    #: Each message begins with the path of a file.
    problems: tuple[str, ...] = ()
    index: CheckpointIndex | None = None


def check_structure(folder: Path) -> Verdict:
    """Check the names and sizes of the files of one checkpoint, and that chunks tile their tensors."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        return Verdict("unfinished", (f"{folder}: {what}",))
    if not os.path.lexists(folder / CONFIG):
        if next(folder.glob("mp_rank_0*"), None) is not None:
            return Verdict("foreign", (f"{folder}: {_LEGACY}",))
        missing = f"{folder / CONFIG}: the file is missing; a save writes it last"
        if not (folder / INDEX).is_file():
            return Verdict("unfinished", (missing,))
    else:
        try:
            if (folder / CONFIG).is_file() and (folder / CONFIG).stat().st_size == 0:
                return Verdict(
                    "unfinished", (f"{folder / CONFIG}: the file is empty; a save writes it last",)
                )
            if _sharded_backend(folder / CONFIG) != "torch_dist" and not os.path.lexists(folder / INDEX):
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
    # Folders without metadata.json are in a format of torch (torch_dcp, fsdp_dtensor); the index comes last.
    found = (_file_problems(index), _place_problems(index), _tensor_problems(index))
    problems = tuple(problem for kind in found for problem in islice(kind, _LIMIT))
    if not missing and index.common_state is None and not (folder / COMMON).is_file():
        path = folder / COMMON
        problems += (f"{path}: the file is missing, and {INDEX} has no common_state in its place",)
    return Verdict("damaged" if problems else "complete", problems, index)


def complete_index(folder: Path, verdict: Verdict | None = None) -> tuple[CheckpointIndex, dict[str, int]]:
    """Return the index of a complete checkpoint, and the size of each file, which must lie in the folder.

    `verdict` is the folder's, if it has been checked.
    """
    verdict = check_structure(folder) if verdict is None else verdict
    if verdict.state == "complete" and verdict.index is not None:
        return verdict.index, {n: regular_file_size(folder / n, folder) for n in verdict.index.files}
    problem = verdict.problems[0] if verdict.problems else f"{folder}: not a torch_dist checkpoint"
    more = "" if verdict.state == "foreign" else f" ({verdict.state}; `nemotron3 check {folder}` says more)"
    raise CheckpointError(problem + more)


def _sharded_backend(path: Path) -> str:
    data = read_file(path, _CONFIG_LIMIT)
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
            users = _contents_beyond(index, name, 0)
            yield f"{path}: {problem.strerror}; it holds {users}"
            continue
        if not stat.S_ISREG(found.st_mode):
            yield f"{path}: it is not a regular file"
        elif found.st_size < need:
            users = _contents_beyond(index, name, found.st_size)
            yield f"{path}: {found.st_size:,} bytes, but {need:,} are needed: cut off are {users}"


def _place_problems(index: CheckpointIndex) -> Iterator[str]:
    """Find archives that share bytes: each of them was written once, behind the others."""
    before, last = "", StoredObject("", 0, 0)
    for name, item in sorted(index.items(), key=lambda one: (one[1].file, one[1].offset)):
        if item.file == last.file and item.offset < last.offset + last.length:
            yield (
                f"{index.folder / INDEX}: {before} and {name} are in the same bytes of {item.file}, from "
                f"{item.offset:,}"
            )
        elif item.length:
            before, last = name, item


def _contents_beyond(index: CheckpointIndex, file: str, size: int) -> str:
    """Name the tensors and objects of `file` that reach beyond `size`."""
    beyond = (name for name, item in index.items() if item.file == file and item.offset + item.length > size)
    names = list(dict.fromkeys(beyond))
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


def tiling_problem(
    shape: Sequence[int], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str | None:
    """Return None if `boxes` of (offsets, sizes) fill a tensor of `shape` exactly once, else a message.

    The number of boxes that cover a point is determined by its mixed differences, which are +1 or -1 at the
    corners of a box and 0 elsewhere. Boxes cover every point once if and only if the summed differences equal
    those of the whole tensor; the first point where they differ has too many boxes, or too few. Axes that no
    box cuts change nothing.
    """
    shape, boxes = tuple(shape), list(boxes)
    corners: defaultdict[tuple[int, ...], int] = defaultdict(int)
    held = 0
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a chunk at {list(offsets)} of shape {list(sizes)} does not have {len(shape)} dimensions"
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape)):
            return f"the chunk at {list(offsets)} of shape {list(sizes)} reaches beyond {list(shape)}"
        held += math.prod(sizes)
    cut = [a for a, n in enumerate(shape) if not n or any(sizes[a] != n for _, sizes in boxes)]
    for offsets, sizes in boxes:
        _add_corners(corners, [offsets[a] for a in cut], [sizes[a] for a in cut], 1)
    _add_corners(corners, [0] * len(cut), [shape[a] for a in cut], -1)
    wrong = min((point for point, count in corners.items() if count), default=None)
    if wrong is None:
        return None
    what = "two chunks overlap" if corners[wrong] > 0 else "no chunk covers the elements"
    place = [dict(zip(cut, wrong)).get(axis, 0) for axis in range(len(shape))]
    return f"{what} at {place}; its chunks hold {held:,} of {math.prod(shape):,} elements"


def _add_corners(
    corners: dict[tuple[int, ...], int], offsets: Sequence[int], sizes: Sequence[int], times: int
) -> None:
    for ends in product((0, 1), repeat=len(sizes)):
        point = tuple(o + s * e for o, s, e in zip(offsets, sizes, ends))
        corners[point] += times * (-1) ** sum(ends)


@dataclass
class IntegrityResult:
    """Result of a full check."""

    records: int = 0
    bytes: int = 0
    #: Archives that were written without CRC32s.
    unprotected: int = 0
    problems: tuple[str, ...] = ()


def check_integrity(
    folder: Path,
    index: CheckpointIndex | None,
    workers: int = 1,
    report: Callable[[int], None] = lambda read: None,
) -> IntegrityResult:
    """Check the CRC32 of every record, and that every chunk holds the tensor the index describes.

    The folder must have passed the structural check. Memory: a block of 64 MiB per worker.
    """
    parts = []
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        for part in pool.map(lambda task: task(), _check_tasks(folder, index)):
            parts.append(part)
            report(part.bytes)
    return IntegrityResult(
        sum(part.records for part in parts),
        sum(part.bytes for part in parts),
        sum(part.unprotected for part in parts),
        tuple(problem for part in parts for problem in part.problems),
    )


def _check_archives(path: Path, items: list[_Item]) -> IntegrityResult:
    result, problems = IntegrityResult(), []
    try:
        with explained(path):
            file = MappedFile(path)
            for name, dtype, place in items:
                try:
                    _check_archive(file, dtype, place, result)
                except (ArchiveError, Refused) as problem:
                    problems.append(f"{path}: {name} at byte {place.offset:,}: {problem}")
    except CheckpointError as problem:
        problems.append(str(problem))
    result.problems = tuple(problems)
    return result


def _check_archive(file: MappedFile, dtype: str, place: StoredObject, result: IntegrityResult) -> None:
    found = records(file, place)
    if all(record.crc == 0 for record in found):  # torch.serialization.set_crc32_options(False)
        result.unprotected += 1
    else:
        for record in found:
            record.check(file)
    result.records += len(found)
    result.bytes += place.length
    if isinstance(place, TensorChunk):
        chunk_layout(file, place, dtype)


def _check_digest(path: Path, expected: str) -> IntegrityResult:
    digest = hashlib.sha256()
    try:
        with explained(path):
            file = MappedFile(path)
            for block in file.blocks(0, file.size):
                digest.update(block)
    except CheckpointError as problem:
        return IntegrityResult(problems=(str(problem),))
    if digest.hexdigest() == expected:
        return IntegrityResult()
    found = f"SHA-256 {digest.hexdigest()[:16]}…, {MANIFEST} says {expected[:16]}…"
    return IntegrityResult(problems=(f"{path}: {found}",))


def _check_tasks(folder: Path, index: CheckpointIndex | None) -> Iterator[Callable[[], IntegrityResult]]:
    items: list[_Item] = []
    if index is not None:
        types = {name: tensor.dtype for name, tensor in index.tensors.items()}
        items += [(name, types.get(name, ""), place) for name, place in index.items()]
    if (folder / COMMON).is_file():
        items.append(("the whole file", "", StoredObject(COMMON, 0, (folder / COMMON).stat().st_size)))
    group: list[_Item] = []
    size = 0
    for item in sorted(items, key=lambda item: (item[2].file, item[2].offset)):
        if group and (item[2].file != group[0][2].file or size > _TASK_BYTES):
            yield partial(_check_archives, folder / group[0][2].file, group)
            group, size = [], 0
        group.append(item)
        size += item[2].length
    if group:
        yield partial(_check_archives, folder / group[0][2].file, group)
    for name, expected in _sha256_manifest(folder).items():
        yield partial(_check_digest, folder / name, expected)


def _sha256_manifest(folder: Path) -> dict[str, str]:
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}
    data = read_file(path, JSON_LIMIT)
    try:
        found = json.loads(data)
        if found.get("algorithm", "sha256") != "sha256":
            raise CheckpointError(f"{path}: algorithm {found['algorithm']!r:.40} is not sha256")
        return {os.path.basename(str(name)): str(digest) for name, digest in found["files"].items()}
    except CheckpointError:
        raise
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: it is not an integrity manifest") from None
