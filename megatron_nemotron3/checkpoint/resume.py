"""Before a run starts: make the tracker name the last complete checkpoint.

Megatron reads `latest_checkpointed_iteration.txt` and loads what it names. It writes the file by opening it
for writing, after the checkpoint: killed in between, the file is empty, and the next run ends at once with
status 0; killed before, the file names the checkpoint before. After a power loss it may name a folder that
never reached the disk. `settle` mends the tracker in these cases, one printed line each time, and stops the
run where the named checkpoint is damaged. Only `remove_incomplete` deletes, in folders that are ours.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_nemotron3.checkpoint.folders import (
    RELEASE,
    TRACKER,
    iterations,
    path_of,
    tracked,
    write_tracker,
)
from megatron_nemotron3.checkpoint.integrity import MANIFEST
from megatron_nemotron3.checkpoint.loading import options
from megatron_nemotron3.checkpoint.structure import CONFIG, Verdict, judge

#: Seconds that other ranks wait for rank 0 to mend the tracker.
PATIENCE = 300.0
#: What the tracker may name: what cannot be checked is upstream's business.
_TRUSTED = ("complete", "legacy", "foreign")


@dataclass(frozen=True)
class Source:
    """A folder to load from, and how."""

    folder: Path
    #: --ckpt-step: the iteration to load whatever the tracker names.
    step: int | None = None
    #: A checkpoint is complete only with its integrity.json (--verify-integrity).
    manifest: bool = False
    #: Iteration of a non-persistent checkpoint, which Megatron prefers if it is not older.
    newer: int | None = None
    #: The cure to name instead of --ckpt-step.
    otherwise: str = ""
    #: That names the folder.
    option: str = "--load"

    @property
    def tracker(self) -> Path:
        """The file that names the checkpoint to load."""
        return self.folder / TRACKER


@dataclass(frozen=True)
class Mend:
    """Write `iteration` into the tracker; `why` goes on a sentence that begins with its path."""

    iteration: int
    why: str


def before_start(argv: Sequence[str], rank: int) -> list[str]:
    """Settle the folders a Megatron command line loads from. Returns lines to print.

    Rank 0 checks and mends. Other ranks go on at once, or wait where the tracker cannot be used yet.

    Raises:
        ValueError: what would be loaded is damaged; the message names the file and the cure.
    """
    given = options(argv)
    prepare = wait if rank else settle
    lines: list[str] = []
    newer = None
    if given.non_persistent is not None:
        cure = "leave --non-persistent-ckpt-type out to load from --load alone"
        lines += prepare(Source(given.non_persistent, manifest=given.manifest, otherwise=cure))
        newer = _named_iteration(given.non_persistent)
    if given.load is not None:
        lines += prepare(Source(given.load, given.step, given.manifest, newer))
    if given.pretrained is not None and not (given.load and (given.load / TRACKER).is_file()):
        source = Source(given.pretrained, given.step, given.manifest, option="--pretrained-checkpoint")
        lines += prepare(source)
        if not source.tracker.is_file():
            raise ValueError(
                f"{source.tracker} does not exist: give --pretrained-checkpoint a folder with this file"
            )
    return lines


def settle(source: Source) -> list[str]:
    """Make the tracker name the last complete checkpoint. Returns lines to print.

    Raises:
        ValueError: as `decide`, or the tracker cannot be written.
    """
    mend = decide(source)
    if mend is None:
        return []
    try:
        write_tracker(source.folder, mend.iteration)
    except OSError as problem:
        raise ValueError(
            f"{source.tracker}: it {mend.why}; the last complete checkpoint is iteration {mend.iteration}, "
            f"but the file cannot be written ({problem.strerror}): write {mend.iteration} into it"
        ) from None
    return [f"{source.tracker} {mend.why}: it now names {mend.iteration}, the last complete checkpoint"]


def wait(source: Source, patience: float = PATIENCE) -> list[str]:
    """On other ranks: return when the tracker can be used, which is at once unless it is broken.

    Raises:
        ValueError: as `decide`, or rank 0 did not mend the tracker within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while not _usable(source.folder) and (mend := decide(source)) is not None:
        while _named_iteration(source.folder) != mend.iteration:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{source.tracker}: it {mend.why}; rank 0 should have written {mend.iteration} into it, "
                    f"but did not within {patience:.0f} s: is the folder shared by all nodes?"
                )
            time.sleep(0.05)
    return []


def decide(source: Source) -> Mend | None:
    """What the tracker needs so that the last complete checkpoint is loaded; None: nothing.

    A checkpoint newer than the tracker's counts if its save ended after the tracker was written: then the
    save was killed in between. A tracker that somebody set back by hand is younger, and stays.

    Raises:
        ValueError: what would be loaded is damaged, or there is a tracker and nothing complete.
    """
    folder, step = source.folder, source.step
    try:
        named, trouble = tracked(folder), ""
    except ValueError as problem:
        named, trouble = None, str(problem)
    if not trouble and step is not None and named != RELEASE:
        _require(folder, step)
        return None
    if named is not None:
        if (later := _finished_later(source, named)) is not None:
            return Mend(later, f"named {_name(named)}, but the save of iteration {later} was complete")
        verdict = judge(path_of(folder, named))
        # Megatron does not look at it if a non-persistent checkpoint is as new.
        unused = source.newer is not None and isinstance(named, int) and source.newer >= named
        if verdict.state in _TRUSTED or unused:
            return None
        if verdict.state == "damaged":
            raise ValueError(_damaged(source, named, verdict))
        trouble = f"named {_name(named)}, which is incomplete ({verdict.problems[0]})"
    found, others = _last_complete(source)
    if found is not None:
        if step is not None:
            _require(folder, step)
        return Mend(found, trouble or "was missing")
    if not trouble and "damaged" not in {verdict.state for verdict in others.values()}:
        return None  # nothing that was ever finished: Megatron starts from random weights
    raise ValueError(_nothing_complete(source, trouble or "is missing", others))


def remove_incomplete(folder: Path) -> list[Path]:
    """Delete what an interrupted save left in a folder of our own. Returns what it deleted.

    These are unfinished folders newer than the one the tracker names; without a tracker, newer than the last
    complete one. What had been finished stays, sound or not.
    """
    newest = _named_iteration(folder)
    if newest is None:
        newest = _last_complete(Source(folder))[0]
    removed = []
    for iteration in reversed(iterations(folder)):
        path = path_of(folder, iteration)
        if (newest is None or iteration > newest) and judge(path).state == "unfinished":
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _usable(folder: Path) -> bool:
    """Whether the tracker names a folder with something in it that a save writes last."""
    try:
        named = tracked(folder)
    except ValueError:
        return False
    if named is None:
        return not iterations(folder)
    path = path_of(folder, named)
    return (path / CONFIG).exists() or next(path.glob("mp_rank_0*"), None) is not None


def _named_iteration(folder: Path) -> int | None:
    try:
        named = tracked(folder)
    except ValueError:
        return None
    return named if isinstance(named, int) else None


def _finished_later(source: Source, named: int | str) -> int | None:
    """The newest complete checkpoint after `named` whose save ended after the tracker was written."""
    after = -1 if isinstance(named, str) else named
    try:
        written = source.tracker.stat().st_mtime_ns
        for iteration in iterations(source.folder):
            if iteration <= after:
                break
            path = path_of(source.folder, iteration)
            last = path / (MANIFEST if source.manifest else CONFIG)
            if last.exists() and last.stat().st_mtime_ns > written and judge(path).state == "complete":
                return iteration
    except OSError:  # a run that still saves here removes an old one meanwhile
        pass
    return None


def _last_complete(source: Source) -> tuple[int | None, dict[int, Verdict]]:
    """(newest complete checkpoint, verdicts on those newer than it)."""
    others: dict[int, Verdict] = {}
    for iteration in iterations(source.folder):
        path = path_of(source.folder, iteration)
        verdict = judge(path)
        if verdict.state == "complete" and (not source.manifest or (path / MANIFEST).exists()):
            return iteration, others
        others[iteration] = verdict
    return None, others


def _require(folder: Path, step: int) -> None:
    verdict = judge(path_of(folder, step))
    if verdict.state not in _TRUSTED:
        other = _another(folder, step)
        cure = "no other checkpoint there is complete" if other is None else f"give --ckpt-step {other}"
        raise ValueError(f"{verdict.problems[0]} (--ckpt-step {step} cannot be loaded: {cure})")


def _another(folder: Path, than: int | str) -> int | None:
    complete = (i for i in iterations(folder) if i != than and judge(path_of(folder, i)).state == "complete")
    return next(complete, None)


def _damaged(source: Source, named: int | str, verdict: Verdict) -> str:
    other = _another(source.folder, named)
    if source.otherwise:
        cure = source.otherwise
    elif other is None:
        cure = "no other checkpoint there is complete"
    elif named == RELEASE:  # --ckpt-step does not lead Megatron away from a release
        cure = f"write {other} into {source.tracker} to load that iteration, which is complete"
    else:
        cure = f"give --ckpt-step {other}, which is complete"
    more = f"; and {len(verdict.problems) - 1} more" if len(verdict.problems) > 1 else ""
    return f"{verdict.problems[0]}{more} ({_name(named)}, which is to be loaded, is damaged: {cure})"


def _nothing_complete(source: Source, trouble: str, others: dict[int, Verdict]) -> str:
    for iteration, verdict in others.items():
        if verdict.state in _TRUSTED:
            return (
                f"{source.tracker}: it {trouble}; whether iteration {iteration} is complete cannot be told "
                f"from its format ({verdict.state}): if you know it is, write {iteration} into the file"
            )
    problem = next((v.problems[0] for v in others.values() if v.state == "damaged"), "")
    own = source.option == "--load"
    return (
        f"{source.tracker}: it {trouble}, and no checkpoint in {source.folder} is complete"
        + (f" ({problem})" if problem else "")
        + f": give another {source.option}"
        + (", or move the checkpoints and this file away to start from random weights" if own else "")
    )


def _name(named: int | str) -> str:
    return "the release checkpoint" if isinstance(named, str) else f"iteration {named}"
