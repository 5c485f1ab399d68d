"""`nemotron3 check`: is a checkpoint of any kind complete and undamaged?"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import (
    MANIFEST,
    RELEASE,
    TRACKER,
    checkpoint_path,
    iterations,
    locate,
    read_tracker,
)
from megatron_nemotron3.checkpoints.metadata import (
    CheckpointError,
    CheckpointIndex,
    count_elements,
    elements_text,
    read_manifest,
)
from megatron_nemotron3.checkpoints.remote import local, place, shown
from megatron_nemotron3.checkpoints.resume import SAVING, LoadFolder, tracker_fix
from megatron_nemotron3.checkpoints.state import common_state, stored_arguments
from megatron_nemotron3.checkpoints.structure import Verdict, check_integrity, check_structure
from megatron_nemotron3.checkpoints.trust import hostile_objects
from megatron_nemotron3.common.files import printable
from megatron_nemotron3.common.lock import holder
from megatron_nemotron3.common.options import add_command, argument, flag, json_flag, option
from megatron_nemotron3.common.output import BYTES, Bar, part, result, say

#: Largest number of problems printed.
_SHOWN = 20
_FORMATS = {"complete": " (torch_dist)", "foreign": " (a format that is not checked here)"}
_LAYOUT = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "CP": "context_parallel_size",
    "DP": "data_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `nemotron3 check`."""

    folder: Path | str = argument(
        "run, its checkpoints or one of them, or a Hugging Face folder", "DIR", parse=place
    )
    full: bool = flag("read all bytes and compare their CRC32s")
    workers: int = option("number of processes or threads (default 4)", "N", default=4, least=1)
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 check`."""
    add_command(commands.add_parser("check"), CheckOptions, check_command)


def check_command(options: CheckOptions) -> int:
    """Run `nemotron3 check`. Returns the exit status: 0 if the checkpoint is sound, else 2."""
    with local(options.folder, every=True) as folder, result(options.json):
        if locate(folder).kind == "hugging face":
            return _check_hugging_face(folder, options.full, options.workers)
        return check(folder, full=options.full, workers=options.workers, notes=True)


def check(folder: Path, *, full: bool = False, workers: int = 4, notes: bool = False) -> int:
    """Print what a folder of Megatron contains and verify it. Returns the exit status.

    If there are several checkpoints, all get the structural check, and `full` reads the one that the tracker
    names. `notes`: also say what was lost before, for which torch is imported.
    """
    found = locate(folder)
    if found.kind == "hugging face":
        raise ValueError(f"{folder}: it is a Hugging Face folder, not Megatron's")
    path = (found.folder if found.kind == "checkpoints" else found.folder.parent) / MANIFEST
    if path.exists():
        read_manifest(path)
    if found.kind == "checkpoints":
        return _print_problems(_check_all(found.folder, iterations(found.folder), full, workers, notes))
    return _print_problems(_check_one(found.folder, full, workers, notes))


def _say_notes(path: Path, verdict: Verdict) -> None:
    """Say what was lost in a Megatron checkpoint before; nothing of one that cannot be opened."""
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_megatron
    from megatron_nemotron3.checkpoints.convert.opened import bias_notes, say_notes

    with contextlib.suppress(ValueError, OSError):
        say_notes(bias_notes(open_megatron(path, omni=True, verdict=verdict)))


def _check_hugging_face(folder: Path, full: bool, workers: int) -> int:
    """Print what a Hugging Face folder contains and verify it: headers, the index, and config.json."""
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face
    from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
    from megatron_nemotron3.checkpoints.convert.hf_folder import open_hf, read_config
    from megatron_nemotron3.checkpoints.convert.opened import (
        checkpoint_facts,
        checkpoint_line,
        notes_of,
        say_notes,
    )
    from megatron_nemotron3.checkpoints.convert.verify import verify_manifest

    stored = open_hf(folder)
    data = read_config(folder, omni=True)
    opened = open_hugging_face(folder, dequantize=QUANTIZATION in data, omni=True)
    say(checkpoint_line(opened), **checkpoint_facts(opened))
    elements = count_elements(stored.tensors.values())
    say(
        f"  tensors      {len(stored.tensors):,}; elements {elements_text(elements)}",
        tensors=len(stored.tensors),
        elements=elements,
    )
    files, size = len(stored.files), sum(stored.files.values())
    say(f"  files        {files:,} with {size:,} bytes", files=files, bytes=size, problems=[])
    say_notes(notes_of(opened, data), "  ")
    if full and (folder / MANIFEST).exists():
        say("  checked      every byte, with the CRC32s of the manifest", checked="bytes")
        with part() as compared:
            status = verify_manifest(folder, workers)
        say(problems=compared.get("problems", []))
        if status:
            say(sound=False)
            return 2
    else:
        line = "checked      names, shapes and sizes; --full compares the manifest's CRC32s, if there is one"
        if full:
            line = f"unprotected  {shown(folder)} has no {MANIFEST} with CRC32s: only names and sizes count"
        say(f"  {line}", checked="names and sizes")
    say("sound", sound=True)
    return 0


def _check_all(folder: Path, found: list[int], full: bool, workers: int, notes: bool) -> list[str]:
    problems: list[str] = []
    named, writer = None, holder(folder)
    try:
        named = read_tracker(folder, 0.0 if writer is None else SAVING)
    except ValueError as problem:
        problems.append(f"{folder / TRACKER}: it {problem}{_tracker_cure(folder)}")
    names: list[int | str] = [*found, RELEASE] if checkpoint_path(folder, RELEASE).is_dir() else [*found]
    for which in reversed(names):
        if which == named:
            continue
        path = checkpoint_path(folder, which)
        verdict = check_structure(path)
        newer = not isinstance(named, int) or (isinstance(which, int) and which > named)
        state, found_here = str(verdict.state), [shown(problem) for problem in verdict.problems]
        text = state + "".join(f": {problem}" for problem in found_here[:1])
        if writer is not None and newer and state in ("unfinished", "damaged"):
            state, found_here, text = "being written", [], f"is being written by {writer}"
        say(f"{path.name} {text}", others=[{"iteration": which, "state": state, "problems": found_here}])
        if state == "damaged":
            problems += verdict.problems
    if named is None:
        if not problems and names and writer is None:
            problems.append(f"{folder / TRACKER}: the file is missing{_tracker_cure(folder)}")
        return problems
    say(f"{TRACKER} names {named}", tracker=named, others=[])
    return problems + _check_one(checkpoint_path(folder, named), full, workers, notes)


def _tracker_cure(folder: Path) -> str:
    """Return the fix of the tracker that a start would make, as the end of a message."""
    fix = None
    with contextlib.suppress(ValueError):
        fix = tracker_fix(LoadFolder(folder))
    if fix is None:
        return "; no checkpoint here is known to be complete"
    last = "" if fix.which == RELEASE else f"the last complete checkpoint is iteration {fix.which}: "
    return f"; {last}write {fix.which} into it"


def _check_one(path: Path, full: bool, workers: int, notes: bool) -> list[str]:
    verdict = check_structure(path)
    if notes:
        _say_notes(path, verdict)
    say(
        f"{shown(path)} {verdict.state}{_FORMATS.get(verdict.state, '')}",
        checkpoint=shown(path),
        kind="megatron",
        state=verdict.state,
    )
    if verdict.index is not None:
        describe(verdict.index)
    if verdict.state == "unfinished" and (writer := holder(path.parent)) is not None:
        return [f"{path}: it is being written by {writer}: check it when it is complete"]
    if verdict.state in ("unfinished", "damaged") or verdict.problems:
        return list(verdict.problems)
    hostile = hostile_objects(path, verdict.index)
    if not full:
        say("  checked      names, sizes and tiling; --full reads everything", checked="names and sizes")
        return hostile
    return hostile + _check_full(path, verdict, workers)


def _check_full(path: Path, verdict: Verdict, workers: int) -> list[str]:
    started = time.monotonic()
    total = sum(verdict.index.files.values()) if verdict.index is not None else None
    try:
        with Bar("check", BYTES, total) as bar:
            read = check_integrity(path, verdict.index, workers, bar.add)
    except CheckpointError as problem:
        return [str(problem)]
    seconds = time.monotonic() - started
    say(
        f"  checked      CRC32 of {read.records:,} records, {read.bytes:,} bytes in {seconds:.1f} s",
        checked="bytes",
        records=read.records,
        bytes_read=read.bytes,
        seconds=seconds,
        archives_without_crc32=read.unprotected,
    )
    if read.unprotected:
        say(f"  unprotected  {read.unprotected:,} archives were written without CRC32: only sizes count")
    return list(read.problems)


def _print_problems(problems: list[str]) -> int:
    sys.stdout.flush()
    said = [shown(problem) for problem in problems]
    say(None if problems else "sound", problems=said, sound=not problems)
    for problem in problems[:_SHOWN]:
        print(f"nemotron3 check: {printable(shown(problem))}", file=sys.stderr)
    if len(problems) > _SHOWN:
        print(f"nemotron3 check: and {len(problems) - _SHOWN:,} more", file=sys.stderr)
    return 2 if problems else 0


def describe(index: CheckpointIndex) -> None:
    """Print what a checkpoint holds; if its arguments cannot be read, a line says why."""
    try:
        state = common_state(index)
    except CheckpointError as problem:
        say(f"  arguments    not shown: {shown(str(problem))}")
    else:
        iteration = state.get("iteration") if type(state.get("iteration")) is int else None
        say(f"  iteration    {'not stored' if iteration is None else iteration}", iteration=iteration)
        if (written := layout_of(state)) is not None:
            say(f"  written with {written}; the weights load into any other layout", written_with=written)
    tensors = index.tensors.values()
    chunks, length = sum(len(tensor.chunks) for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    elements = count_elements(tensors)
    say(
        f"  tensors      {len(tensors):,} in {chunks:,} chunks; elements {elements_text(elements)}: "
        f"{length:,} bytes",
        tensors=len(tensors),
        chunks=chunks,
        elements=elements,
        tensor_bytes=length,
    )
    weights = [one for name, one in index.tensors.items() if "optimizer" not in name.split(".")]
    model = sum(math.prod(tensor.shape) for tensor in weights)
    rest = ", the rest is optimizer state" * (model < sum(math.prod(tensor.shape) for tensor in tensors))
    say(f"  of these     {model:,} elements are the model's{rest}", model_elements=model)
    say(f"  objects      {len(index.objects):,}", objects=len(index.objects))
    files, size = len(index.files), sum(index.files.values())
    say(f"  files        {files:,} with {size:,} bytes", files=files, bytes=size)


def layout_of(state: dict[str, Any]) -> str | None:
    """Return "TP2 PP1 … on 2 ranks" from the stored arguments; None if there are none."""
    sizes = stored_arguments(state)
    known = [f"{short}{sizes[name]}" for short, name in _LAYOUT.items() if type(sizes.get(name)) is int]
    if not known:
        return None
    ranks = sizes.get("world_size")
    return " ".join(known) + (f" on {ranks} rank{'s' * (ranks != 1)}" if type(ranks) is int else "")
