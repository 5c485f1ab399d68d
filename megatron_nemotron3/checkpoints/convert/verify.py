"""Compare two checkpoints of any kind, or a folder with its manifest, and print the result."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.compare import Difference, compare
from megatron_nemotron3.checkpoints.convert.job import MANIFEST
from megatron_nemotron3.checkpoints.convert.job_options import ConvertOptions
from megatron_nemotron3.checkpoints.convert.notes import bias_notes, narrower_notes
from megatron_nemotron3.checkpoints.convert.opened import checkpoint_facts, checkpoint_line
from megatron_nemotron3.checkpoints.convert.streams import BAND
from megatron_nemotron3.checkpoints.mapped import MappedFile, explained
from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_json
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.common.output import BYTES, Bar, say, size_text
from megatron_nemotron3.common.processes import bulk_work, parallel_map

#: Largest number of differences printed.
_SHOWN = 20


@bulk_work()
def verify(
    a: Path,
    b: Path | None,
    options: ConvertOptions,
    both: Mapping[str, Any],
    first: Mapping[str, Any],
) -> int:
    """Compare two checkpoints, or one with its manifest. Returns the exit status: 0 equal, 1 not.

    `both` and `first` are more options of `open_checkpoint`, for both sides and for `a` alone.
    """
    if b is None:
        return verify_manifest(a, options.workers)
    wanted = {
        "model": options.model,
        "allow_unused": options.allow_unused,
        "alpha": options.lora_alpha,
        "omni": True,
        **both,
    }
    sides = [open_checkpoint(a, **wanted, **first), open_checkpoint(b, **wanted)]
    for name, side in zip("ab", sides):
        say(f"{name}            {checkpoint_line(side)}", **{name: checkpoint_facts(side)})
    views = [side.hf_view() for side in sides]
    for note in (*(n for side in sides for n in bias_notes(side)), *narrower_notes(*views)):
        say(note, notes=[" ".join(note.split())])
    total = sum(t.nbytes for name, t in views[0].tensors.items() if name in views[1].tensors)
    started = time.monotonic()
    problems, equal, elements = 0, 0, 0
    say(differences=[])
    with Bar("verify", BYTES, total) as bar:
        for one in compare(*views, workers=options.workers, report=bar.to):
            if isinstance(one, Difference):
                problems += 1
                line = f"differs      {one.name}: {one.what}" if problems <= _SHOWN else None
                with bar.paused() if line else nullcontext():
                    say(line, differences=[{"tensor": one.name, "what": one.what}])
            else:
                equal, elements = equal + 1, elements + one.elements
    if problems > _SHOWN:
        say(f"differs      and {problems - _SHOWN:,} more")
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


def verify_manifest(folder: Path, workers: int) -> int:
    """Compare the files of a folder with its manifest. Returns the exit status: 0 equal, 1 not."""
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder}: it has no {MANIFEST}: give a second checkpoint to compare with")
    entries = read_json(folder / MANIFEST).get("files")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{folder / MANIFEST}: it lists no files")

    def work(name: str, count: Callable[[int], None]) -> str | None:
        entry, path = entries[name], folder / name
        if not isinstance(entry, dict) or Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{folder / MANIFEST}: {name!r:.100} is not an entry of a file below the folder"
        crc = 0
        try:
            with explained(path):
                file = MappedFile(path)
                if file.size != entry.get("bytes"):  # before a file of any length is read
                    return f"{path}: {file.size:,} bytes, {entry.get('bytes')!r:.30} were written"
                for start in range(0, file.size, BAND):
                    block = file(start, min(BAND, file.size - start))
                    crc = zlib.crc32(block, crc)
                    count(len(block))
        except CheckpointError as problem:
            return str(problem)
        if f"{crc:08x}" != entry.get("crc32"):
            return f"{path}: CRC32 {crc:08x}, {entry.get('crc32')!r:.30} was written"
        return None

    sizes = [entry.get("bytes") for entry in entries.values() if isinstance(entry, dict)]
    with Bar("verify", BYTES, sum(size for size in sizes if type(size) is int), lines=False) as bar:
        results = parallel_map(work, sorted(entries), workers=workers, report=bar.to)
        problems = [found for found in results if found]
    for number, problem in enumerate(problems):
        say(shown(problem) if number < _SHOWN else None, problems=[shown(problem)])
    say(
        f"{len(entries) - len(problems):,} of {len(entries):,} files are as the manifest says",
        manifest=shown(folder / MANIFEST),
        equal=not problems,
        files=len(entries),
        files_equal=len(entries) - len(problems),
        problems=[],
    )
    return 1 if problems else 0
