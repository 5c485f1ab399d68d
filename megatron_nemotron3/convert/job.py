"""Write a folder of planned files: in several processes, restartable, and atomically.

    OUT.partial/            the folder while it is written; it is renamed to OUT at the end
      journal.jsonl         the fingerprint of the plan, then one line per finished file

A killed job leaves OUT.partial. The same command continues it: files in the journal stay, the others are
written again. Files depend only on the plan, so the result is the same as without the interruption.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.files import sync_folder, temporary_prefix, write_bytes
from megatron_nemotron3.checkpoint.folders import free_bytes
from megatron_nemotron3.convert.sources import TensorSource
from megatron_nemotron3.convert.streams import FilePlan, write
from megatron_nemotron3.convert.workers import parallel_map

JOURNAL = "journal.jsonl"
MANIFEST = "nemotron3_manifest.json"
#: Free space, in bytes, that a job does not use.
_RESERVE = 64 << 20


@dataclass(frozen=True)
class Job:
    """A folder to write."""

    target: Path
    source: TensorSource
    files: Sequence[FilePlan]
    #: Small files, written in this order after all others; the last ones make the folder valid.
    small: Mapping[str, bytes] = field(default_factory=dict)
    #: Origin of the folder, for the manifest; part of the fingerprint.
    origin: Mapping[str, Any] = field(default_factory=dict)
    #: Refuse NaN and infinities.
    finite: bool = True

    @property
    def length(self) -> int:
        """Size of all files in bytes."""
        return sum(plan.length for plan in self.files) + sum(map(len, self.small.values()))

    def fingerprint(self) -> str:
        """Return a hash of the source's files, the plan and the options."""
        stats = {name: os.stat(self.source.folder / name).st_mtime_ns for name in self.source.files}
        digest = hashlib.sha256(
            json.dumps([self.origin, dict(self.source.files), stats], sort_keys=True, default=str).encode()
        )
        for plan in self.files:
            digest.update(f"{plan.name} {plan.length}".encode())
            for part in plan.parts:
                digest.update(part.head)
                digest.update(f"{part.tensor} {part.slices} {part.dtype}".encode())
        for name, data in self.small.items():
            digest.update(name.encode() + data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Progress:
    """Progress of a job in bytes; `rate` in bytes/s since this process started."""

    done: int
    total: int
    rate: float

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time; None if unknown."""
        return (self.total - self.done) / self.rate if self.rate else None


def check_target(target: Path) -> None:
    """Check that `target` can be created.

    Raises:
        ValueError: `target` exists and is not an empty folder, or its parent is not a writable folder.
    """
    if os.path.lexists(target) and not (
        target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    ):
        raise ValueError(f"{target}: it exists: give a new folder, or remove it")
    parent = target.absolute().parent
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{target}: {parent} is not a writable folder: choose another place")


def partial_of(target: Path) -> Path:
    """Return the path of a folder while it is written."""
    return target.with_name(target.name + ".partial")


def run(
    job: Job, *, workers: int = 1, report: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Any]:
    """Write the folder. Returns its manifest.

    Args:
        workers: processes.
        report: called about once a second.

    Raises:
        ValueError: the target exists, the disk is too small, or OUT.partial belongs to another conversion or
            is in use.
        CheckpointError: a source is damaged.
        OSError: a file cannot be written.
    """
    check_target(job.target)
    partial = partial_of(job.target)
    fingerprint = job.fingerprint()
    done = _finished_files(partial, fingerprint, job)
    todo = [plan for plan in job.files if plan.name not in done]
    need = sum(plan.length for plan in todo) + sum(map(len, job.small.values()))
    free = free_bytes(job.target)
    if need + _RESERVE > free:
        raise ValueError(
            f"{job.target}: {need:,} bytes are still to be written, {free:,} are free (64 MiB are kept "
            "free): choose another place or free some space"
        )
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial), contextlib.ExitStack() as stack:
        _remove_leftovers(partial, set(done))
        lines = [{"plan": fingerprint}, *({"file": name, **entry} for name, entry in done.items())]
        write_bytes(partial / JOURNAL, b"".join(map(_journal_line, lines)))
        journal = stack.enter_context(open(partial / JOURNAL, "ab"))
        for name, entry in _write_files(todo, job, partial, workers, report):
            done[name] = entry
            journal.write(_journal_line({"file": name, **entry}))
            journal.flush()
            os.fsync(journal.fileno())
        manifest = {
            "format": 1,
            "made_by": "megatron-nemotron3",
            **job.origin,
            "files": {plan.name: done[plan.name] for plan in job.files},
        }
        for name, data in job.small.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(partial / name, data)
        write_bytes(partial / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        (partial / JOURNAL).unlink()
        sync_folder(partial)
        if job.target.is_dir():
            job.target.rmdir()
        os.replace(partial, job.target)
        sync_folder(job.target.absolute().parent)
    return manifest


def _finished_files(partial: Path, fingerprint: str, job: Job) -> dict[str, dict[str, Any]]:
    """Return the files of the journal that exist in full length.

    Raises:
        ValueError: the journal belongs to another plan.
    """
    if not os.path.lexists(partial):
        return {}
    lines = _journal_lines(partial, fingerprint, job)
    if lines and lines[0].get("plan") != fingerprint:
        raise ValueError(
            f"{partial}: it belongs to an interrupted conversion with other options or another source: "
            "repeat that command, or remove the folder"
        )
    lengths = {plan.name: plan.length for plan in job.files}
    done = {}
    for line in lines[1:]:
        name = line.pop("file", None)
        with contextlib.suppress(OSError):
            if name in lengths and (partial / name).stat().st_size == lengths[name] == line.get("bytes"):
                done[name] = line
    return done


def _journal_lines(partial: Path, fingerprint: str, job: Job) -> list[dict[str, Any]]:
    """Return the lines of the journal, or of the manifest if the job was killed just before the rename.

    Raises:
        ValueError: the folder is not an interrupted conversion.
    """
    lines = []
    if (partial / JOURNAL).exists():
        with open(partial / JOURNAL, "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # the last line may be truncated
                    lines.append(json.loads(line))
        return lines
    with contextlib.suppress(OSError, ValueError):
        manifest = json.loads((partial / MANIFEST).read_bytes())
        if all(manifest[key] == value for key, value in json.loads(json.dumps(job.origin)).items()):
            files = manifest["files"].items()
            return [{"plan": fingerprint}, *({"file": name, **entry} for name, entry in files)]
    # Killed before the journal was renamed.
    if any(not path.name.startswith(temporary_prefix(JOURNAL)) for path in partial.iterdir()):
        raise ValueError(f"{partial}: it exists and is not an interrupted conversion: remove it")
    return []


def _write_files(
    todo: Sequence[FilePlan], job: Job, partial: Path, workers: int, report: Callable[[Progress], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write files in any order; yield (name, manifest entry) of each finished file."""
    total = sum(plan.length for plan in job.files)
    before = total - sum(plan.length for plan in todo)
    for plan in todo:
        (partial / plan.name).parent.mkdir(parents=True, exist_ok=True)

    def write_one(number: int, count: Callable[[int], None]) -> tuple[str, dict[str, Any]]:
        plan = todo[number]
        crc = write(plan, job.source, partial / plan.name, count, finite=job.finite)
        return plan.name, {"bytes": plan.length, "crc32": f"{crc:08x}"}

    def tell(done: int, seconds: float) -> None:
        report(Progress(before + done, total, done / seconds if seconds else 0.0))

    yield from parallel_map(write_one, range(len(todo)), workers=workers, report=tell)


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Lock the folder for this process and its workers, until all of them have ended.

    Raises:
        ValueError: another process has locked it.
    """
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        for attempt in range(50):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 49:
                    raise ValueError(f"{partial}: another process is writing it") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(partial: Path, keep: set[str]) -> None:
    """Remove what an interrupted job left, except finished files."""
    for path in sorted(partial.rglob("*"), reverse=True):
        name = path.relative_to(partial).as_posix()
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()
        elif name not in keep and name != JOURNAL:
            path.unlink()


def _journal_line(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(entry) + "\n").encode()
