"""Write a folder of planned files: in several processes, restartable, and atomically.

OUT.partial/ is the folder while it is written. Its journal.jsonl has the fingerprint of the plan, which
covers the options and the source, and a line for each finished file. A killed job leaves it, and the same
command continues it: files in the journal stay, the others are written again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.hf_folder import CONFIG, INDEX
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, write
from megatron_nemotron3.checkpoints.folders import MANIFEST, free_bytes
from megatron_nemotron3.checkpoints.metadata import COMMON, CheckpointError
from megatron_nemotron3.checkpoints.metadata import INDEX as MEGATRON_INDEX
from megatron_nemotron3.checkpoints.structure import CONFIG as MEGATRON_CONFIG
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.files import (
    not_writable,
    read_outside,
    short_name,
    sync_folder,
    temporary_prefix,
    write_bytes,
    write_json,
)
from megatron_nemotron3.common.processes import parallel_map

JOURNAL = "journal.jsonl"
#: Files of a source that say what its tensors are.
_METADATA = (CONFIG, INDEX, MEGATRON_INDEX, MEGATRON_CONFIG, COMMON)
#: Errors of a full disk, a full quota, and a file that is longer than the process may write.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Free space, in bytes, that a job does not use.
_RESERVE = 64 << 20
#: Longest journal, and longest file of _METADATA, that is read, in bytes.
_METADATA_LIMIT = 1 << 30


#: (offset, length) of each part of a file.
Places = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Job:
    """A folder to write."""

    target: Path
    source: TensorSource
    files: Sequence[FilePlan]
    #: Small files, written in this order after all others; the last ones make the folder valid.
    small: Mapping[str, bytes] = field(default_factory=dict)
    #: Makes more small files, which come first, from the places of the parts in each file.
    index: Callable[[Mapping[str, Places]], Mapping[str, bytes]] | None = None
    #: Origin of the folder, for the manifest; part of the fingerprint.
    origin: Mapping[str, Any] = field(default_factory=dict)
    #: Every option that may change the result; part of the fingerprint.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Refuse NaN and infinities.
    finite: bool = True

    @property
    def length(self) -> int:
        return sum(plan.length for plan in self.files) + sum(map(len, self.small.values()))

    def fingerprint(self) -> str:
        parts = [self.origin, self.options, self.source_state()]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
        for plan in self.files:
            digest.update(f"{plan.name} {plan.length}".encode())
            for part in plan.parts:
                digest.update(part.data + f"{part.tensor} {part.slices} {part.dtype}".encode())
        for name, data in self.small.items():
            digest.update(name.encode() + data)
        return digest.hexdigest()

    def source_state(self) -> dict[str, Any]:
        """Return size and time of the source's files, and hashes of its metadata."""
        state: dict[str, Any] = {}
        for name, size in self.source.files.items():
            found = os.stat(self.source.folder / name)
            if found.st_size != size:
                raise CheckpointError(
                    f"{self.source.folder / name}: it had {size:,} bytes when it was opened, now it has "
                    f"{found.st_size:,}"
                )
            state[name] = [size, found.st_mtime_ns]
        for name in _METADATA:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                data = read_outside(self.source.folder / name, limit=_METADATA_LIMIT)
                state[f"content of {name}"] = hashlib.sha256(data).hexdigest()
        return state


@dataclass(frozen=True)
class JobProgress:
    """Progress of a job in bytes; `begun` of them were written before this process started."""

    done: int
    total: int
    begun: int = 0


def check_target(target: Path) -> None:
    """Check that `target` can be created."""
    if os.path.lexists(target) and not (
        target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    ):
        raise ValueError(f"{target}: it exists: give a new folder, or remove it")
    if (parent := not_writable(target.absolute().parent)) is not None:
        raise ValueError(f"{target}: {parent} is not a writable folder: choose another place")


def partial_of(target: Path) -> Path:
    """Return the path of a folder while it is written."""
    return target.with_name(short_name(target.name) + ".partial")


def run(
    job: Job, *, workers: int = 1, report: Callable[[JobProgress], None] = lambda progress: None
) -> dict[str, Any]:
    """Write the folder in `workers` processes. Returns its manifest."""
    check_target(job.target)
    partial = partial_of(job.target)
    if partial.is_symlink():
        raise ValueError(f"{partial}: it is a link: remove it")
    try:
        with lock.held(partial):
            check_target(job.target)  # another process may just have finished it
            try:
                return _run_locked(job, partial, workers, report)
            except CheckpointError:
                if not _journal_lines(partial)[1:]:  # no file is finished: there is nothing to continue
                    shutil.rmtree(partial)
                raise
    except FileNotFoundError:
        check_target(job.target)  # it has finished it while this one waited for the lock
        raise
    except OSError as problem:
        if problem.errno not in _FULL:
            raise
        raise OSError(
            problem.errno,
            f"{os.strerror(problem.errno)}, {free_bytes(partial) / 1e6:,.0f} MB are free; the finished files "
            "are kept: free some space and repeat the command, which continues",
            os.fspath(partial),
        ) from None


def _run_locked(
    job: Job, partial: Path, workers: int, report: Callable[[JobProgress], None]
) -> dict[str, Any]:
    state, fingerprint = job.source_state(), job.fingerprint()
    done = _finished_files(partial, fingerprint, job)
    todo = [plan for plan in job.files if plan.name not in done]
    need = sum(plan.length for plan in todo) + sum(map(len, job.small.values()))
    free = free_bytes(job.target)
    if need + _RESERVE > free:
        raise ValueError(
            f"{job.target}: {need:,} bytes are still to be written, {free:,} are free (64 MiB are kept "
            "free): choose another place or free some space"
        )
    _remove_leftovers(partial, set(done))
    lines = [{"plan": fingerprint}, *({"file": name, **entry} for name, entry in done.items())]
    write_bytes(partial / JOURNAL, b"".join(map(_journal_line, lines)))

    def write_one(plan: FilePlan, count: Callable[[int], None]) -> dict[str, Any]:
        (partial / plan.name).parent.mkdir(parents=True, exist_ok=True)
        return write(plan, job.source, partial / plan.name, count, finite=job.finite)

    with open(partial / JOURNAL, "ab") as journal:
        for name, entry in write_files(job, todo, write_one, workers, report):
            done[name] = entry
            journal.write(_journal_line({"file": name, **entry}))
            journal.flush()
            os.fsync(journal.fileno())
    manifest, small = checked_manifest(job, state, fingerprint, done, partial)
    for name, data in small.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(partial / name, data)
    write_json(partial / MANIFEST, manifest)
    sync_folder(partial)
    if job.target.is_dir():
        job.target.rmdir()
    os.replace(partial, job.target)
    for name in (JOURNAL, lock.NAME):
        (job.target / name).unlink(missing_ok=True)
    sync_folder(job.target.absolute().parent)
    return manifest


def checked_manifest(
    job: Job, state: dict[str, Any], fingerprint: str, done: Mapping[str, dict[str, Any]], partial: Path | str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Compare the source with its `state` before the work. Returns the manifest and the small files."""
    if job.source_state() != state:
        raise ValueError(
            f"{job.source.folder}: its files changed while they were converted: remove {partial} and repeat "
            "the command when nothing writes there"
        )
    places = {name: [tuple(place) for place in entry.pop("places", ())] for name, entry in done.items()}
    small = {**(job.index(places) if job.index is not None else {}), **job.small}
    manifest = {
        "format": 1,
        "made_by": "megatron-nemotron3",
        **job.origin,
        "plan": fingerprint,
        "files": {plan.name: done[plan.name] for plan in job.files},
    }
    return manifest, small


def _finished_files(partial: Path, fingerprint: str, job: Job) -> dict[str, dict[str, Any]]:
    """Return the files of the journal that exist in full length."""
    lines = _journal_lines(partial)
    if lines and lines[0].get("plan") != fingerprint:
        raise ValueError(
            f"{partial}: it belongs to an interrupted conversion with other options or another source, or "
            "the source has changed since: repeat that command, or remove the folder"
        )
    plans, home = {plan.name: plan for plan in job.files}, os.path.realpath(partial)
    done: dict[str, dict[str, Any]] = {}
    for line in lines[1:]:
        plan = plans.get(name) if isinstance(name := line.pop("file", None), str) else None
        if plan is None or not usable(plan, line):
            continue
        with contextlib.suppress(OSError):
            path = partial / name
            if path.stat().st_size == line["bytes"] and os.path.realpath(path) == os.path.join(home, name):
                done[name] = line
    return done


def usable(plan: FilePlan, entry: Any) -> bool:
    """Whether a line of a journal describes a finished file of a plan."""
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or "crc32" not in entry:
        return False
    places, at = entry.get("places", []), 0
    if not isinstance(places, list) or len(places) != (len(plan.parts) if plan.archives else 0):
        return False
    for part, place in zip(plan.parts, places):
        if not isinstance(place, list) or len(place) != 2 or place[0] != at or type(place[1]) is not int:
            return False
        if place[1] < part.length:
            return False
        at += place[1]
    return not plan.archives or at == entry["bytes"]


def _journal_lines(partial: Path) -> list[dict[str, Any]]:
    """Return the lines of the journal."""
    lines = []
    if os.path.lexists(partial / JOURNAL):
        for line in read_outside(partial / JOURNAL, limit=_METADATA_LIMIT).splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # the last line may be truncated
                if isinstance(found := json.loads(line), dict):
                    lines.append(found)
        return lines
    # Killed before the journal was renamed.
    own = (temporary_prefix(JOURNAL), lock.NAME)
    if any(not path.name.startswith(own) for path in partial.iterdir()):
        raise ValueError(f"{partial}: it exists and is not an interrupted conversion: remove it")
    return []


def write_files(
    job: Job,
    todo: Sequence[FilePlan],
    write_one: Callable[[FilePlan, Callable[[int], None]], dict[str, Any]],
    workers: int,
    report: Callable[[JobProgress], None],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write files by `write_one(plan, count)`; yield name and journal entry of each one that is finished."""
    total = sum(plan.length for plan in job.files)
    before = total - sum(plan.length for plan in todo)

    def work(number: int, count: Callable[[int], None]) -> tuple[str, dict[str, Any]]:
        return todo[number].name, write_one(todo[number], count)

    def progress(written: int) -> None:
        if job.index is not None:
            # Needed for the index in the end; workers write while this process imports it.
            importlib.import_module("torch.distributed.checkpoint.filesystem")
        report(JobProgress(before + written, total, before))

    yield from parallel_map(work, range(len(todo)), workers=workers, report=progress)


def _remove_leftovers(partial: Path, keep: set[str]) -> None:
    for path in sorted(partial.rglob("*"), reverse=True):
        name = path.relative_to(partial).as_posix()
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()
        elif name not in keep and name not in (JOURNAL, lock.NAME):
            path.unlink()


def _journal_line(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(entry) + "\n").encode()
