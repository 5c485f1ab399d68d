"""Before a run starts: make the tracker name the last complete checkpoint.

Megatron writes the tracker, `latest_checkpointed_iteration.txt`, after the checkpoint, but not atomically.
Killed meanwhile, it leaves an empty file, and the next run ends at once with status 0; killed earlier, a file
that names the checkpoint before. After a power failure the file may name a folder that never reached the
disk.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_nemotron3.checkpoints.folders import (
    RELEASE,
    TRACKER,
    checkpoint_path,
    iterations,
    latest_iteration,
    named_checkpoint,
    read_tracker,
    write_tracker,
)
from megatron_nemotron3.checkpoints.structure import CONFIG, MANIFEST, Verdict, check_structure
from megatron_nemotron3.checkpoints.trust import require_trusted
from megatron_nemotron3.common.lock import Holder, holder
from megatron_nemotron3.common.parser import option_value

#: Seconds that other ranks wait until rank 0 has repaired the tracker.
PATIENCE = 300.0
#: Seconds in which another run, which is saving, may leave the tracker empty.
SAVING = 2.0
#: States that the named checkpoint may have; Megatron itself checks the formats that are not checked here.
_TRUSTED = ("complete", "foreign")
#: Options of Megatron, and of frameworks around it, that name checkpoints of teachers and references.
_ALSO_LOADED = ("--export-kd-teacher-load", "--ref-load", "--bert-load", "--ict-load")
#: Where Megatron keeps non-persistent checkpoints below --load.
NON_PERSISTENT = "non_persistent"


@dataclass(frozen=True)
class LoadOptions:
    """What a Megatron command line says about loading."""

    load: Path | None = None
    #: --ckpt-step; 0 and None both mean the iteration that the tracker names.
    step: int | None = None
    #: Folder of global non-persistent checkpoints, if they are used.
    non_persistent: Path | None = None
    #: --verify-integrity: a save ends with integrity.json.
    manifest: bool = False
    #: --pretrained-checkpoint: where a run starts if --load has no checkpoint.
    pretrained: Path | None = None


def load_options(argv: Sequence[str]) -> LoadOptions:
    """Read Megatron's command line: the last value of an option counts, object stores (msc://…) do not."""
    named = option_value(argv, "--load")
    load = _local_path(named)
    # Whether an object store holds a checkpoint is unknown, and so is whether this option takes effect.
    pretrained = _local_path(option_value(argv, "--pretrained-checkpoint")) if load or not named else None
    step = option_value(argv, "--ckpt-step")
    non_persistent = None
    if option_value(argv, "--non-persistent-ckpt-type") == "global":
        given = option_value(argv, "--non-persistent-global-ckpt-dir")
        non_persistent = _local_path(given) if given else load and load / NON_PERSISTENT
    number = int(step) if step is not None and step.isascii() and step.isdigit() else None
    return LoadOptions(load, number or None, non_persistent, "--verify-integrity" in argv, pretrained)


@dataclass(frozen=True)
class LoadFolder:
    """A folder to load a checkpoint from."""

    folder: Path
    #: --ckpt-step: the iteration to load, whatever the tracker names.
    step: int | None = None
    #: A checkpoint without integrity.json is incomplete (--verify-integrity).
    manifest: bool = False
    #: Iteration of a non-persistent checkpoint. Megatron prefers it if it is not older.
    non_persistent: int | None = None
    #: The cure to name in errors instead of --ckpt-step.
    cure: str = ""
    #: The option that named the folder.
    option: str = "--load"

    @property
    def tracker(self) -> Path:
        return self.folder / TRACKER


@dataclass(frozen=True)
class TrackerFix:
    """What to write into the tracker, and why: a phrase that continues "the tracker …"."""

    #: An iteration, or "release".
    which: int | str
    why: str


def before_start(argv: Sequence[str], rank: int, key: str = "") -> list[str]:
    """Prepare the folders that a Megatron command line loads from. Returns lines to print.

    Rank 0 repairs the trackers, other ranks wait until they are usable.
    """
    options = load_options(argv)

    def prepare(source: LoadFolder) -> list[str]:
        return wait_for_repair(source) if rank else repair_tracker(source, key)

    lines: list[str] = []
    newer = None
    if options.non_persistent is not None:
        cure = "leave --non-persistent-ckpt-type out to load from --load alone"
        lines += prepare(LoadFolder(options.non_persistent, manifest=options.manifest, cure=cure))
        newer = latest_iteration(options.non_persistent)
    if options.load is not None:
        lines += prepare(LoadFolder(options.load, options.step, options.manifest, newer))
    if options.pretrained is not None and not (options.load and (options.load / TRACKER).is_file()):
        option = "--pretrained-checkpoint"
        source = LoadFolder(options.pretrained, options.step, options.manifest, option=option)
        lines += prepare(source)
        if not source.tracker.is_file():
            raise ValueError(f"{source.tracker} does not exist: give {option} a folder with this file")
    return lines


def require_trusted_start(argv: Sequence[str]) -> None:
    """Raise ValueError if a checkpoint that a Megatron command line loads has a hostile object (`trust`)."""
    options = load_options(argv)
    others = [_local_path(option_value(argv, name)) for name in _ALSO_LOADED]
    for folder in filter(None, (options.load, options.non_persistent, options.pretrained, *others)):
        if (named := named_checkpoint(folder)) is not None:
            which = options.step if options.step and named != RELEASE else named
            require_trusted(checkpoint_path(folder, which))
    of_node = option_value(argv, "--non-persistent-local-ckpt-dir")
    for folder in Path(of_node).glob("*/") if of_node else ():
        require_trusted(folder)


def repair_tracker(source: LoadFolder, key: str = "") -> list[str]:
    """Make the tracker name the last complete checkpoint. Returns lines to print."""
    fix = tracker_fix(source)
    if fix is None:
        return []
    if (other := holder(source.folder)) is not None and other.key != key:
        _wait_for_writer(source, fix, other)
        return []
    try:
        write_tracker(source.folder, fix.which)
    except OSError as problem:
        raise ValueError(
            f"{source.tracker}: it {fix.why}; the last complete checkpoint is {_checkpoint_name(fix.which)}, "
            f"but the file cannot be written ({problem.strerror}): write {fix.which} into it"
        ) from None
    return [f"{source.tracker} {fix.why}: it now names {fix.which}, the last complete checkpoint"]


def _wait_for_writer(source: LoadFolder, fix: TrackerFix, other: Holder) -> None:
    """Return when the tracker is usable. A run that is saving writes it in two steps."""
    deadline = time.monotonic() + SAVING
    while not _tracker_usable(source.folder):
        if time.monotonic() > deadline:
            raise ValueError(f"{source.tracker}: it {fix.why}, and the folder is being written by {other}")
        time.sleep(0.05)


def wait_for_repair(source: LoadFolder, patience: float = PATIENCE) -> list[str]:
    """Return as soon as the tracker is usable: at once, unless rank 0 has to repair it."""
    deadline = time.monotonic() + patience
    while not _tracker_usable(source.folder) and (fix := tracker_fix(source)) is not None:
        while named_checkpoint(source.folder) != fix.which:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{source.tracker}: it {fix.why}; rank 0 should have written {fix.which} into it, "
                    f"but did not within {patience:.0f} s: is the folder shared by all nodes?"
                )
            time.sleep(0.05)
    return []


def tracker_fix(source: LoadFolder) -> TrackerFix | None:
    """Return the fix after which the last complete checkpoint is loaded; None if nothing is wrong.

    A checkpoint newer than the one in the tracker counts if its save ended after the tracker was written,
    because then the save was killed between the two. A tracker that a user set back by hand is newer than
    that, and is left alone. A release counts if no save of an iteration was ever finished.
    """
    folder, step = source.folder, source.step
    try:
        named, trouble = read_tracker(folder), ""
    except ValueError as problem:
        named, trouble = None, str(problem)
    if not trouble and step is not None and named != RELEASE:
        _require_loadable(folder, step)
        return None
    if named is not None:
        if (later := _finished_later(source, named)) is not None:
            return TrackerFix(
                later, f"named {_checkpoint_name(named)}, but the save of iteration {later} was complete"
            )
        verdict = check_structure(checkpoint_path(folder, named))
        # Megatron ignores it if a non-persistent checkpoint is at least as new.
        unused = (
            source.non_persistent is not None and isinstance(named, int) and source.non_persistent >= named
        )
        if verdict.state in _TRUSTED or unused:
            return None
        if verdict.state == "damaged":
            raise ValueError(_damaged_message(source, named, verdict))
        trouble = f"named {_checkpoint_name(named)}, which is incomplete ({verdict.problems[0]})"
    found: int | str | None
    found, others = _last_complete(source)
    unfinished = all(verdict.state == "unfinished" for verdict in others.values())
    release = checkpoint_path(folder, RELEASE)
    if found is None and named != RELEASE and unfinished and release.is_dir():
        verdict = check_structure(release)
        if verdict.state == "complete":
            found = RELEASE
        elif verdict.state == "damaged":
            raise ValueError(f"{verdict.problems[0]} ({folder} has no other checkpoint)")
    if found is not None:
        if step is not None:
            _require_loadable(folder, step)
        return TrackerFix(found, trouble or "was missing")
    if not trouble and "damaged" not in {verdict.state for verdict in others.values()}:
        return None  # no save was ever finished: Megatron starts from random weights
    raise ValueError(_nothing_complete_message(source, trouble or "is missing", others))


def remove_incomplete(folder: Path) -> list[Path]:
    """Delete the unfinished checkpoints of interrupted saves. Returns the deleted folders.

    Only unfinished folders newer than the checkpoint in the tracker are deleted; without a tracker, newer
    than the last complete one. Finished checkpoints stay, even damaged ones.
    """
    newest = latest_iteration(folder)
    if newest is None:
        newest = _last_complete(LoadFolder(folder))[0]
    removed = []
    for iteration in reversed(iterations(folder)):
        path = checkpoint_path(folder, iteration)
        if (newest is None or iteration > newest) and check_structure(path).state == "unfinished":
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _tracker_usable(folder: Path) -> bool:
    """Whether the tracker names a folder that contains a file which a save writes last."""
    try:
        named = read_tracker(folder)
    except ValueError:
        return False
    if named is None:
        return not iterations(folder) and not checkpoint_path(folder, RELEASE).is_dir()
    path = checkpoint_path(folder, named)
    return (path / CONFIG).exists() or next(path.glob("mp_rank_0*"), None) is not None


def _finished_later(source: LoadFolder, named: int | str) -> int | None:
    """Find the newest complete checkpoint after `named` whose save ended after the tracker was written."""
    after = -1 if isinstance(named, str) else named
    try:
        written = source.tracker.stat().st_mtime_ns
        for iteration in iterations(source.folder):
            if iteration <= after:
                break
            path = checkpoint_path(source.folder, iteration)
            last = path / (MANIFEST if source.manifest else CONFIG)
            if (
                last.exists()
                and written < last.stat().st_mtime_ns <= time.time_ns()  # a time to come says nothing
                and check_structure(path).state == "complete"
            ):
                return iteration
    except OSError:  # a run that is still saving here may remove an old checkpoint meanwhile
        pass
    return None


def _last_complete(source: LoadFolder) -> tuple[int | None, dict[int, Verdict]]:
    """Find the newest complete checkpoint, and the verdicts on all newer ones."""
    others: dict[int, Verdict] = {}
    for iteration in iterations(source.folder):
        path = checkpoint_path(source.folder, iteration)
        verdict = check_structure(path)
        if verdict.state == "complete" and (not source.manifest or (path / MANIFEST).exists()):
            return iteration, others
        others[iteration] = verdict
    return None, others


def _require_loadable(folder: Path, step: int) -> None:
    verdict = check_structure(checkpoint_path(folder, step))
    if verdict.state not in _TRUSTED:
        other = _other_complete(folder, step)
        cure = "no other checkpoint there is complete" if other is None else f"give --ckpt-step {other}"
        raise ValueError(f"{verdict.problems[0]} (--ckpt-step {step} cannot be loaded: {cure})")


def _other_complete(folder: Path, than: int | str) -> int | None:
    others = (number for number in iterations(folder) if number != than)
    return next((n for n in others if check_structure(checkpoint_path(folder, n)).state == "complete"), None)


def _damaged_message(source: LoadFolder, named: int | str, verdict: Verdict) -> str:
    other = _other_complete(source.folder, named)
    if source.cure:
        cure = source.cure
    elif other is None:
        cure = "no other checkpoint there is complete"
    elif named == RELEASE:  # Megatron ignores --ckpt-step if the tracker names a release
        cure = f"write {other} into {source.tracker} to load that iteration, which is complete"
    else:
        cure = f"give --ckpt-step {other}, which is complete"
    more = f"; and {len(verdict.problems) - 1} more" if len(verdict.problems) > 1 else ""
    return (
        f"{verdict.problems[0]}{more} ({_checkpoint_name(named)}, which is to be loaded, is damaged: {cure})"
    )


def _nothing_complete_message(source: LoadFolder, trouble: str, others: dict[int, Verdict]) -> str:
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


def _checkpoint_name(named: int | str) -> str:
    return "the release checkpoint" if isinstance(named, str) else f"iteration {named}"


def _local_path(value: str | None) -> Path | None:
    return None if not value or "://" in value else Path(value)
