"""`nemotron3 convert to-hf CHECKPOINTS HF_DIR --watch`: export every new checkpoint of a running job.

HF_DIR/iter_0000300      one Hugging Face folder per iteration; written as iter_0000300.partial

What is exported is what HF_DIR holds, so after a kill the same command continues where it was.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import time
from pathlib import Path
from types import FrameType

from megatron_nemotron3.checkpoints.convert.conversion import ToHfOptions, convert_to_hf
from megatron_nemotron3.checkpoints.convert.job import MANIFEST, partial_of
from megatron_nemotron3.checkpoints.folders import (
    CHECKPOINTS,
    checkpoint_path,
    iteration_of,
    iterations,
    latest_iteration,
    locate,
)
from megatron_nemotron3.checkpoints.structure import check_structure
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.output import part, say

#: Seconds between two looks.
INTERVAL = 30.0
#: What `partial_of` and --keep-last add to a name.
_NO_EXPORT = re.compile(r"(.*)\.(partial|removed)")


@dataclasses.dataclass(frozen=True)
class Following:
    """How to follow a job.

    Attributes:
        interval: seconds between two looks.
        once: look once, export what is there, and stop.
        keep_last: number of exports that are kept; None keeps all.
    """

    interval: float = INTERVAL
    once: bool = False
    keep_last: int | None = None


def follow(source: Path, target: Path, options: ToHfOptions, how: Following) -> int:
    """Export checkpoints until a signal ends it. Returns the exit status: 1 if an export failed, else 0.

    An iteration is exported once it is complete and the tracker has reached it, so a save in progress is not
    touched. One that is removed while it is read, or fails for another reason, ends in a line; the next
    follows.

    Raises:
        ValueError: an option is out of range, `source` is no folder of a job, or `target` is in use.
        OSError: `target` cannot be written.
    """
    if not 0 < how.interval < 1e6:
        raise ValueError(f"--watch {how.interval:g}: give seconds above 0")
    if how.keep_last is not None and how.keep_last < 1:
        raise ValueError(f"--keep-last {how.keep_last}: give 1 or more")
    if options.dry_run or options.iteration is not None:
        raise ValueError("--watch exports what a job saves: leave out --dry-run and --iteration")
    _check_source(source)
    if foreign := sorted(set(iterations(target)) - set(_exported(target))):
        raise ValueError(
            f"{checkpoint_path(target, foreign[0])}: it exists and is not an export: give another folder"
        )
    with lock.held(target):
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            return _follow(source, target, options, how)
        except KeyboardInterrupt:
            say("stopped      the same command continues")
            return 0
        finally:
            signal.signal(signal.SIGTERM, before)


def _follow(source: Path, target: Path, options: ToHfOptions, how: Following) -> int:
    failed: dict[int, str] = {}
    say(
        f"watching     {source}" + ("" if how.once else f", every {how.interval:g} s"),
        source=source,
        target=target,
        exports=[],
        left_out=[],
        removed=[],
    )
    while True:
        done = _exported(target)
        for iteration in _waiting(source, done, how.keep_last):
            with part() as facts:
                problem = _export(source, target, iteration, options)
            if not problem:
                say(exports=[{"iteration": iteration, **facts}])
            if problem and failed.get(iteration) != problem:
                say(
                    f"left out     iteration {iteration}: {problem}",
                    left_out=[{"iteration": iteration, "problem": problem}],
                )
                failed[iteration] = problem
            elif not problem:
                failed.pop(iteration, None)
        if how.keep_last is not None:
            for iteration in _exported(target)[how.keep_last :]:
                place = checkpoint_path(target, iteration)
                # What a kill leaves is then no export, and is removed later.
                place.rename(target / f"{place.name}.removed")
                say(f"removed      {place}", removed=[place])
        _remove_outdated(source, target)
        if how.once:
            return 1 if failed else 0
        time.sleep(how.interval)


def _check_source(source: Path) -> None:
    """Check that a folder is a job's: one without a checkpoint may get some."""
    try:
        kind = locate(source).kind
    except ValueError:
        if not source.is_dir() or (iterations(source) and (source / CHECKPOINTS).is_dir()):
            raise
        return
    if kind != "checkpoints":
        raise ValueError(f"{source}: --watch needs the folder of a run, or that of --save")


def _saves(source: Path) -> Path:
    return source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source


def _waiting(source: Path, done: list[int], keep: int | None) -> list[int]:
    """List the complete iterations that are to be exported, oldest first."""
    folder = _saves(source)
    latest = latest_iteration(folder)
    there = [n for n in iterations(folder) if latest is not None and n <= latest]
    newest = sorted({*there, *done}, reverse=True)[:keep]
    states = ("complete", "legacy")
    return [
        n
        for n in reversed(newest)
        if n not in done and n in there and check_structure(checkpoint_path(folder, n)).state in states
    ]


def _export(source: Path, target: Path, iteration: int, options: ToHfOptions) -> str | None:
    """Export an iteration. Returns None, or why it was left out."""
    place = checkpoint_path(target, iteration)
    try:
        status = convert_to_hf(source, place, dataclasses.replace(options, iteration=iteration))
        return "--check-logits failed" if status else None
    except (ValueError, OSError) as problem:
        if check_structure(checkpoint_path(_saves(source), iteration)).state in ("complete", "legacy"):
            return str(problem)
        shutil.rmtree(partial_of(place), ignore_errors=True)
        return "it was removed while it was read"
    finally:
        if not place.exists() and not any(partial_of(place).glob("*")):
            shutil.rmtree(partial_of(place), ignore_errors=True)


def _exported(target: Path) -> list[int]:
    """List the iterations that are exported, newest first."""
    return [n for n in iterations(target) if (checkpoint_path(target, n) / MANIFEST).is_file()]


def _remove_outdated(source: Path, target: Path) -> None:
    """Remove what was begun of iterations that no longer exist, and what --keep-last set aside."""
    there = set(iterations(_saves(source)))
    for path in target.iterdir():
        match = _NO_EXPORT.fullmatch(path.name)
        number = iteration_of(match[1]) if match else None
        if match and number is not None and (match[2] == "removed" or number not in there):
            shutil.rmtree(path, ignore_errors=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
