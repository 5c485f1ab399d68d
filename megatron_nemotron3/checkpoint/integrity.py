"""Full check of a checkpoint: read everything and compare the CRC32 of every record.

torch.save writes a CRC32 with every record, but torch.load does not check it: a flipped bit in a weight
loads as another weight.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_nemotron3.checkpoint.archive import BLOCK, ArchiveError, crc_problem, records, without_crc
from megatron_nemotron3.checkpoint.metadata import (
    COMMON,
    INDEX,
    CheckpointError,
    CheckpointIndex,
    Chunk,
    StoredObject,
)
from megatron_nemotron3.checkpoint.read import opened, tensor_layout
from megatron_nemotron3.checkpoint.structure import legacy_files
from megatron_nemotron3.checkpoint.unpickle import Refused

#: Written by Megatron with --verify-integrity: SHA-256 of every file.
MANIFEST = "integrity.json"
#: Bytes read by one task.
_TASK_BYTES = 256 << 20


@dataclass
class Read:
    """Result of a full check."""

    records: int = 0
    bytes: int = 0
    #: Archives that were written without CRC32s.
    unprotected: int = 0
    problems: tuple[str, ...] = ()


def check_integrity(folder: Path, index: CheckpointIndex | None, workers: int = 1) -> Read:
    """Check the CRC32 of every record, and that every chunk holds the tensor the index describes.

    Every byte is read once, or twice if there is an integrity.json (SHA-256 of whole files). Memory: one
    block per worker. The folder must have passed the structural check.

    Args:
        index: index of a torch_dist folder; None for a legacy folder.
    """
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        parts = list(pool.map(lambda task: task(), _check_tasks(folder, index)))
    return Read(
        sum(part.records for part in parts),
        sum(part.bytes for part in parts),
        sum(part.unprotected for part in parts),
        tuple(problem for part in parts for problem in part.problems),
    )


@dataclass(frozen=True)
class _Archives:
    """Neighboring archives of one file: (name, dtype or "" for an object, position) of each."""

    path: Path
    items: list[tuple[str, str, StoredObject]]

    def __call__(self) -> Read:
        result, problems = Read(), []
        try:
            with opened(self.path) as descriptor:
                for name, dtype, place in self.items:
                    try:
                        self._check_archive(descriptor, dtype, place, result)
                    except (ArchiveError, Refused) as problem:
                        problems.append(f"{self.path}: {name} at byte {place.offset:,}: {problem}")
        except CheckpointError as problem:
            problems.append(str(problem))
        result.problems = tuple(problems)
        return result

    def _check_archive(self, descriptor: int, dtype: str, place: StoredObject, result: Read) -> None:
        found = records(descriptor, place.offset, place.length)
        if without_crc(found):
            result.unprotected += 1
        else:
            for record in found:
                if problem := crc_problem(descriptor, record):
                    raise ArchiveError(problem)
        result.records += len(found)
        result.bytes += place.length
        if isinstance(place, Chunk):
            layout = tensor_layout(descriptor, place)
            if (layout.dtype, layout.shape) != (dtype, place.sizes):
                raise ArchiveError(
                    f"it holds {layout.dtype} of shape {list(layout.shape)}, "
                    f"{INDEX} says {dtype} of shape {list(place.sizes)}"
                )


@dataclass(frozen=True)
class _Digest:
    """Check of one file against integrity.json."""

    path: Path
    expected: str

    def __call__(self) -> Read:
        digest = hashlib.sha256()
        try:
            with open(self.path, "rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
        except OSError as problem:
            return Read(problems=(f"{self.path}: {problem.strerror}",))
        if digest.hexdigest() == self.expected:
            return Read()
        return Read(
            problems=(
                f"{self.path}: SHA-256 {digest.hexdigest()[:16]}…, {MANIFEST} says {self.expected[:16]}…",
            )
        )


def _check_tasks(folder: Path, index: CheckpointIndex | None) -> Iterator[_Archives | _Digest]:
    items: list[tuple[str, str, StoredObject]] = []
    if index is not None:
        for name, tensor in index.tensors.items():
            items += [(name, tensor.dtype, chunk) for chunk in tensor.chunks]
        items += [(name, "", place) for name, place in index.objects.items()]
    whole = [folder / COMMON] if (folder / COMMON).is_file() else []
    for path in [*whole, *legacy_files(folder)]:
        items.append(
            ("the whole file", "", StoredObject(str(path.relative_to(folder)), 0, path.stat().st_size))
        )
    group: list[tuple[str, str, StoredObject]] = []
    size = 0
    for item in sorted(items, key=lambda item: (item[2].file, item[2].offset)):
        if group and (item[2].file != group[0][2].file or size > _TASK_BYTES):
            yield _Archives(folder / group[0][2].file, group)
            group, size = [], 0
        group.append(item)
        size += item[2].length
    if group:
        yield _Archives(folder / group[0][2].file, group)
    for name, expected in _sha256_manifest(folder).items():
        yield _Digest(folder / name, expected)


def _sha256_manifest(folder: Path) -> dict[str, str]:
    """Read file -> SHA-256 from integrity.json; empty if the file does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / MANIFEST
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
        if found.get("algorithm", "sha256") != "sha256":
            raise CheckpointError(f"{path}: algorithm {found['algorithm']!r:.40} is not sha256")
        return {os.path.basename(str(name)): str(digest) for name, digest in found["files"].items()}
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    except CheckpointError:
        raise
    except (ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: it is not an integrity manifest") from None
