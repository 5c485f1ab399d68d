"""Compare two checkpoints of any kind, or a folder with its manifest, and print the result."""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
from megatron_nemotron3.checkpoints.convert.hf_folder import read_config
from megatron_nemotron3.checkpoints.convert.inventory import WEIGHT_TYPES
from megatron_nemotron3.checkpoints.convert.opened import (
    bias_notes,
    checkpoint_facts,
    checkpoint_line,
    narrower_notes,
    say_notes,
    unmatched_notes,
)
from megatron_nemotron3.checkpoints.convert.plan import bands, whole
from megatron_nemotron3.checkpoints.convert.sources import TensorSource, raw
from megatron_nemotron3.checkpoints.convert.streams import BAND
from megatron_nemotron3.checkpoints.folders import MANIFEST, is_hugging_face
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, CheckpointError, explained, read_manifest
from megatron_nemotron3.checkpoints.read import MappedFile
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.common.output import BYTES, Bar, count, say, size_text
from megatron_nemotron3.common.processes import bulk_work, parallel_map

#: Largest number of differences printed.
_SHOWN = 20
#: Tensors per work item.
_BATCH = 64


@bulk_work()
def verify(a: Path, b: Path, both: Mapping[str, Any], first: Mapping[str, Any], workers: int) -> int:
    """Compare two checkpoints; returns the exit status: 0 equal bit by bit, 1 not.

    Args:
        both: options of `open_checkpoint` for both sides.
        first: more options for `a`.
    """
    packed = [is_hugging_face(one) and QUANTIZATION in read_config(one, omni=True) for one in (a, b)]
    read = [{**both, "dequantize": both.get("dequantize") and (one or not any(packed))} for one in packed]
    sides = [open_checkpoint(a, omni=True, **read[0], **first), open_checkpoint(b, omni=True, **read[1])]
    if both.get("alpha") is not None and all(side.adapter is None for side in sides):
        raise ValueError(f"--lora-alpha: {a} and {b} have no LoRA adapter: leave it out")
    for name, side in zip("ab", sides):
        say(f"{name}            {checkpoint_line(side)}", **{name: checkpoint_facts(side)})
    mine, theirs = (side.hf_view() for side in sides)
    say_notes(unmatched_notes(one for one in sides[0].unmatched if one in sides[1].unmatched))
    say_notes(note for side in sides for note in bias_notes(side))
    say_notes(narrower_notes(mine, theirs))
    total = sum(t.nbytes for name, t in mine.tensors.items() if name in theirs.tensors)
    started = time.monotonic()
    problems, equal, elements = 0, 0, 0
    farthest: dict[str, Any] | None = None
    say(differences=[])
    with Bar("verify", BYTES, total) as bar:
        for name, what in _compared(mine, theirs, workers, bar.to):
            if what is None:
                equal, elements = equal + 1, elements + prod(mine.tensors[name].shape)
                continue
            problems += 1
            line = f"differs      {name}: {what.text}" if problems <= _SHOWN else None
            fact = {"tensor": name, "what": what.text, "largest": what.largest, "relative": what.relative}
            if what.relative is not None and (farthest is None or what.relative > farthest["relative"]):
                farthest = fact
            with bar.paused() if line else nullcontext():
                say(line, differences=[fact])
    if problems > _SHOWN:
        say(f"differs      and {problems - _SHOWN:,} more")
    if farthest is not None:
        say(
            f"farthest     {farthest['tensor']}: {_apart(farthest['largest'], farthest['relative'])}",
            farthest=farthest,
        )
    seconds = time.monotonic() - started
    say(
        f"{'equal' if not problems else 'not equal'}: {equal:,} tensors with {elements:,} elements are equal "
        f"bit by bit, {problems:,} differ; {size_text(total)} of each side in {seconds:.1f} s",
        equal=not problems,
        tensors_equal=equal,
        elements_equal=elements,
        tensors_different=problems,
        bytes=total,
        seconds=seconds,
    )
    return 1 if problems else 0


class _Difference(NamedTuple):
    text: str
    #: The largest difference of two elements, and that as a share of the largest magnitude.
    largest: float | None = None
    relative: float | None = None


def _apart(largest: float, relative: float) -> str:
    return f"up to {largest:.3g} apart, {relative:.2%} of its largest value"


def _compared(
    a: TensorSource, b: TensorSource, workers: int, report: Callable[[int], None]
) -> Iterator[tuple[str, _Difference | None]]:
    """Yield tensors and how they differ, those of one side first; None: they are equal bit by bit."""
    yield from ((name, _Difference("only the first has it")) for name in a.tensors if name not in b.tensors)
    yield from ((name, _Difference("only the second has it")) for name in b.tensors if name not in a.tensors)
    both = [name for name in a.tensors if name in b.tensors]
    batches = [both[i : i + _BATCH] for i in range(0, len(both), _BATCH)]

    def work(names: Sequence[str], count: Callable[[int], None]) -> list[tuple[str, _Difference | None]]:
        return [(name, _difference(a, b, name, count)) for name in names]

    for found in parallel_map(work, batches, workers=workers, report=report):
        yield from found


def _difference(
    a: TensorSource, b: TensorSource, name: str, count: Callable[[int], None]
) -> _Difference | None:
    """Describe how a tensor differs; None if it is equal bit by bit."""
    one, other = a.tensors[name], b.tensors[name]
    if one.shape != other.shape:
        return _Difference(f"shape {list(one.shape)} and {list(other.shape)}")
    if one.dtype != other.dtype:
        return _with_distance(f"type {one.dtype} and {other.dtype}", a, b, name)
    differ = 0
    first: list[int] | None = None
    for band in bands(whole(one.shape), BAND // ITEM_SIZE[one.dtype]):
        mine, theirs = raw(a.read(name, band)), raw(b.read(name, band))
        count(mine.nbytes)
        if not mine.equal(theirs):
            unequal = mine != theirs
            if first is None:
                first = [start + i for (start, _), i in zip(band, unequal.nonzero()[0].tolist())]
            differ += int(unequal.sum())
    if not differ:
        return None
    return _with_distance(f"{differ:,} of {prod(one.shape):,} elements, first at {first}", a, b, name)


def _with_distance(text: str, a: TensorSource, b: TensorSource, name: str) -> _Difference:
    """Add the largest difference of two elements, unless values are codes or not finite."""
    if not {a.tensors[name].dtype, b.tensors[name].dtype} <= set(WEIGHT_TYPES):
        return _Difference(text)
    largest = magnitude = 0.0
    for band in bands(whole(a.tensors[name].shape), BAND // 8):
        one, other = a.read(name, band).double(), b.read(name, band).double()
        largest = max(largest, (one - other).abs().nan_to_num(math.inf).max().item())
        magnitude = max(magnitude, one.abs().max().item(), other.abs().max().item())
    if not math.isfinite(largest):
        return _Difference(text)
    apart = largest, largest / magnitude if magnitude else 0.0
    return _Difference(f"{text}, {_apart(*apart)}", *apart)


@bulk_work()
def verify_manifest(folder: Path, workers: int) -> int:
    """Compare the files of a folder with its manifest. Returns the exit status: 0 equal, 1 not."""
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder}: it has no {MANIFEST}: give a second checkpoint to compare with")
    files, problems = _compared_with_manifest(folder, workers)
    for number, problem in enumerate(problems):
        say(shown(problem) if number < _SHOWN else None, problems=[shown(problem)])
    say(
        f"{files - len(problems):,} of {files:,} files are as the manifest says",
        manifest=shown(folder / MANIFEST),
        equal=not problems,
        files=files,
        files_equal=files - len(problems),
        problems=[],
    )
    return 1 if problems else 0


def require_manifest(folder: Path, workers: int) -> str | None:
    """Compare a local folder with its manifest, if it has one; return a line that says so.

    Raises CheckpointError for a file that differs.
    """
    if not (folder / MANIFEST).exists() or shown(folder) != os.fspath(folder):  # a URL would be read twice
        return None
    files, problems = _compared_with_manifest(folder, workers)
    if problems:
        more = f" (and {count(len(problems) - 1, 'file')} more)" if problems[1:] else ""
        raise CheckpointError(
            f"{problems[0]}{more}: copy it again, or remove {MANIFEST} if you have changed the weights"
        )
    return f"manifest     {count(files, 'file')} as {MANIFEST} says"


def _compared_with_manifest(folder: Path, workers: int) -> tuple[int, list[str]]:
    """Return how many files the manifest of a folder lists, and a line for each that differs."""
    entries = read_manifest(folder / MANIFEST)

    def work(name: str, read: Callable[[int], None]) -> str | None:
        entry, path = entries[name], folder / name
        if not isinstance(entry, dict) or Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{folder / MANIFEST}: {name!r:.100} is not an entry of a file below the folder"
        crc = 0
        try:
            with explained(path):
                file = MappedFile(path)
                if file.size != entry.get("bytes"):  # before a file of any length is read
                    return f"{path}: {file.size:,} bytes, {entry.get('bytes')!r:.30} were written"
                for block in file.blocks(0, file.size, BAND):
                    crc = zlib.crc32(block, crc)
                    read(len(block))
        except CheckpointError as problem:
            return str(problem)
        if f"{crc:08x}" != entry.get("crc32"):
            return f"{path}: CRC32 {crc:08x}, {entry.get('crc32')!r:.30} was written"
        return None

    sizes = [entry.get("bytes") for entry in entries.values() if isinstance(entry, dict)]
    with Bar("verify", BYTES, sum(size for size in sizes if type(size) is int)) as bar:
        results = parallel_map(work, sorted(entries), workers=workers, report=bar.to)
        problems = [found for found in results if found]
    return len(entries), problems
