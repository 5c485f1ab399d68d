"""Full check of a checkpoint: read everything and compare the CRC32 of every record.

torch.save writes a CRC32 with every record, but torch.load does not check it: a flipped bit in a weight
loads as another weight.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_nemotron3.checkpoints.mapped import ArchiveError, MappedFile, explained
from megatron_nemotron3.checkpoints.metadata import (
    COMMON,
    JSON_LIMIT,
    CheckpointError,
    CheckpointIndex,
    StoredObject,
    TensorChunk,
    read_file,
)
from megatron_nemotron3.checkpoints.pickles import Refused
from megatron_nemotron3.checkpoints.read import chunk_layout, records

#: Written by Megatron with --verify-integrity: SHA-256 of every file.
MANIFEST = "integrity.json"
#: Bytes that are hashed at a time, and that one task reads.
_BLOCK = 64 << 20
_TASK_BYTES = 256 << 20
#: (name, dtype or "" for an object, position) of an archive.
_Item = tuple[str, str, StoredObject]


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

    Every byte is read once, or twice if there is an integrity.json (SHA-256 of whole files). Memory: one
    block per worker. The folder must have passed the structural check.
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
            for start in range(0, file.size, _BLOCK):
                digest.update(file(start, min(_BLOCK, file.size - start)))
    except CheckpointError as problem:
        return IntegrityResult(problems=(str(problem),))
    if digest.hexdigest() == expected:
        return IntegrityResult()
    found = f"SHA-256 {digest.hexdigest()[:16]}…, {MANIFEST} says {expected[:16]}…"
    return IntegrityResult(problems=(f"{path}: {found}",))


def _check_tasks(folder: Path, index: CheckpointIndex | None) -> Iterator[Callable[[], IntegrityResult]]:
    items: list[_Item] = []
    if index is not None:
        for name, tensor in index.tensors.items():
            items += [(name, tensor.dtype, chunk) for chunk in tensor.chunks]
        items += [(name, "", place) for name, place in index.objects.items()]
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
