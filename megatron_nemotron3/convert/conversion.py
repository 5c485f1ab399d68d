"""Convert and compare checkpoints, and print the plan, the progress and the result."""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_nemotron3.checkpoint.files import open_outside
from megatron_nemotron3.checkpoint.folders import free_bytes
from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE, CheckpointError, read_json
from megatron_nemotron3.convert import from_hf, to_hf
from megatron_nemotron3.convert.checkpoints import (
    Checkpoint,
    open_checkpoint,
    open_hugging_face,
    open_megatron,
)
from megatron_nemotron3.convert.compare import Difference, compare
from megatron_nemotron3.convert.hf_folder import CONFIG, is_hf, read_config
from megatron_nemotron3.convert.inventory import mappings
from megatron_nemotron3.convert.job import MANIFEST, Job, Progress, check_target, partial_of, run
from megatron_nemotron3.convert.quantized_config import read_scales
from megatron_nemotron3.convert.quantized_recipes import Quantization, quantization
from megatron_nemotron3.convert.quantized_views import Quantized
from megatron_nemotron3.convert.sources import TensorSource
from megatron_nemotron3.convert.streams import BAND
from megatron_nemotron3.convert.views import Cast, Converted
from megatron_nemotron3.convert.workers import parallel_map
from megatron_nemotron3.models import Nemotron3Config

#: Largest number of differences printed.
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of both directions; names and meaning are those of the command line."""

    #: Default: the model is read from the checkpoint.
    model: Nemotron3Config | None = None
    #: Default: types are kept.
    dtype: str | None = None
    allow_unused: Sequence[str] = ()
    workers: int = 1
    dry_run: bool = False
    shard_bytes: int = to_hf.SHARD_BYTES
    allow_nonfinite: bool = False
    #: Called with Megatron's weights, Hugging Face's and the model after the conversion; returns the exit
    #: status (--check-logits).
    compare_logits: Callable[[TensorSource, TensorSource, Nemotron3Config], int] | None = None


@dataclass(frozen=True, kw_only=True)
class ToHfOptions(Options):
    """Options of `convert_to_hf`."""

    #: Default: the iteration that the tracker names.
    iteration: int | None = None
    vocab_size: int | None = None
    from_masters: bool = False
    reference: Path | None = None
    #: Recipe of `quantized_recipes`.
    quantize: str | None = None
    input_scales: Path | None = None


@dataclass(frozen=True, kw_only=True)
class FromHfOptions(Options):
    """Options of `convert_from_hf`."""

    make_vocab_size_divisible_by: int = 128
    dequantize: bool = False


def convert_to_hf(source: Path, target: Path, options: ToHfOptions) -> int:
    """Convert a Megatron checkpoint to a Hugging Face folder. Returns the exit status.

    Raises:
        ValueError: the source is not a valid checkpoint of the model, the target exists, or the disk is full.
        OSError: a file cannot be written.
    """
    check_target(target)
    _require_torch(options.dtype or options.quantize)
    vocab_size, reference = options.vocab_size, options.reference
    if is_hf(source):
        raise ValueError(f"{source}: it is a Hugging Face folder: use `nemotron3 convert from-hf`")
    if vocab_size is None and reference is not None and (reference / CONFIG).exists():
        stated = read_config(reference).get("vocab_size")
        vocab_size = stated if type(stated) is int else None
    opened = open_megatron(
        source,
        model=options.model,
        iteration=options.iteration,
        vocab_size=vocab_size,
        from_masters=options.from_masters,
        allow_unused=options.allow_unused,
    )
    view = opened.hf_view()
    dtype = _main_dtype(view)
    view = _cast(view, options.dtype, opened, hf=True)
    plan = None
    if options.quantize is not None:
        if options.compare_logits is not None:
            raise ValueError(
                "--check-logits: quantized weights give other logits: leave out --quantize or --check-logits"
            )
        scales = read_scales(options.input_scales) if options.input_scales is not None else None
        plan = quantization(opened.config, options.quantize, scales, options.dtype or dtype)
        view = Quantized(view, plan)
    elif options.input_scales is not None:
        raise ValueError("--input-scales: it needs --quantize")
    small = to_hf.small_files(
        opened.config,
        view.tensors,
        limit=options.shard_bytes,
        reference=reference,
        dtype=options.dtype or dtype,
        quantization=plan,
    )
    files = to_hf.files(view.tensors, options.shard_bytes)
    for line in _quantized_lines(plan):
        print(line)
    job = Job(target, view, files, small, _job_origin(opened, options), not options.allow_nonfinite)
    if not _run_job(opened, target, job, options) or options.compare_logits is None:
        return 0
    megatron = _cast(opened.weights, options.dtype, opened, hf=False)
    hf = open_hugging_face(target, model=options.model).weights
    return options.compare_logits(megatron, hf, opened.config)


def convert_from_hf(source: Path, target: Path, options: FromHfOptions) -> int:
    """Convert a Hugging Face folder to a Megatron checkpoint. Returns the exit status.

    Raises:
        ValueError: as `convert_to_hf`.
        OSError: a file cannot be written.
    """
    check_target(target)
    _require_torch(options.dtype or options.dequantize)
    divisor = options.make_vocab_size_divisible_by
    if divisor < 1:
        raise ValueError(f"--make-vocab-size-divisible-by {divisor}: use 1 or more")
    if options.dequantize and options.compare_logits is not None:
        raise ValueError(
            "--check-logits: transformers does not compute with quantized weights: leave out --dequantize or "
            "--check-logits"
        )
    opened = open_hugging_face(
        source, model=options.model, allow_unused=options.allow_unused, dequantize=options.dequantize
    )
    rows = from_hf.pad_vocab_size(opened.config.vocab_size, divisor)
    dtype = options.dtype or _main_dtype(opened.weights)
    weights = _cast(opened.weights, options.dtype, opened, hf=True)
    view = Converted(weights, mappings(opened.config, padded_vocab_size=rows), to_hf=False)
    files, small = from_hf.plan(
        view, opened.config, padded_vocab_size=rows, dtype=dtype, limit=options.shard_bytes
    )
    job = Job(target, view, files, small, _job_origin(opened, options), not options.allow_nonfinite)
    if not _run_job(opened, target, job, options) or options.compare_logits is None:
        return 0
    made = open_megatron(target, model=opened.config)
    return options.compare_logits(made.weights, weights, opened.config)


def _run_job(opened: Checkpoint, target: Path, job: Job, options: Options) -> bool:
    """Print the plan and write the folder. Returns whether it was written."""
    for line in _plan_lines(opened, target, job):
        print(line)
    if options.dry_run:
        print("dry run      nothing was written")
        return False
    sys.stdout.flush()
    started = time.monotonic()
    show = _ProgressLine()
    run(job, workers=options.workers, report=show.progress)
    show.end()
    seconds = time.monotonic() - started
    print(
        f"written      {_size(job.length)} in {seconds:.1f} s; {target / MANIFEST} has the CRC32 of each file"
    )
    if options.compare_logits is None and not isinstance(job.source, Quantized):
        print(f"next         nemotron3 verify {opened.folder} {target}")
    return True


def verify(
    a: Path, b: Path | None, options: Options, *, dequantize: bool = False, vocab_size: int | None = None
) -> int:
    """Compare two checkpoints of any kind, or one with its manifest. Returns the exit status: 0 equal, 1 not.

    Raises:
        ValueError: one is not a valid checkpoint.
    """
    if b is None:
        return _verify_manifest(a, options.workers)
    wanted = {
        "model": options.model,
        "allow_unused": options.allow_unused,
        "dequantize": dequantize,
        "vocab_size": vocab_size,
    }
    sides = [open_checkpoint(p, **wanted) for p in (a, b)]
    for name, side in zip("ab", sides):
        print(f"{name}            {_checkpoint_line(side)}")
    views = [side.hf_view() for side in sides]
    show = _ProgressLine()
    total = sum(t.nbytes for name, t in views[0].tensors.items() if name in views[1].tensors)
    started = time.monotonic()
    problems, equal, elements = 0, 0, 0
    found = compare(
        *views,
        workers=options.workers,
        report=lambda d, s: show.progress(Progress(d, total, d / s if s else 0)),
    )
    for one in found:
        if isinstance(one, Difference):
            problems += 1
            if problems <= _SHOWN:
                show.end()
                print(f"differs      {one.name}: {one.what}")
        else:
            equal, elements = equal + 1, elements + one.elements
    show.end()
    if problems > _SHOWN:
        print(f"differs      and {problems - _SHOWN:,} more")
    print(
        f"{'equal' if not problems else 'not equal'}: {equal:,} tensors with {elements:,} elements are equal "
        f"bit by bit, {problems:,} differ; {_size(total)} of each side in {time.monotonic() - started:.1f} s"
    )
    return 1 if problems else 0


def _verify_manifest(folder: Path, workers: int) -> int:
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder}: it has no {MANIFEST}: give a second checkpoint to compare with")
    entries = read_json(folder / MANIFEST).get("files")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{folder / MANIFEST}: it lists no files")

    def work(name: str, count: Callable[[int], None]) -> str | None:
        entry, path = entries[name], folder / name
        if not isinstance(entry, dict) or Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{folder / MANIFEST}: {name!r:.100} is not an entry of a file below the folder"
        crc = length = 0
        try:
            with open_outside(path) as file:
                length = os.fstat(file.fileno()).st_size
                if length != entry.get("bytes"):  # before a file of any length is read
                    return f"{path}: {length:,} bytes, {entry.get('bytes')!r:.30} were written"
                length = 0
                while block := file.read(BAND):
                    crc, length = zlib.crc32(block, crc), length + len(block)
                    count(len(block))
        except OSError as problem:
            return f"{path}: {problem.strerror}"
        except ValueError as problem:
            return str(problem)
        if length != entry.get("bytes"):
            return f"{path}: {length:,} bytes, {entry.get('bytes')!r:.30} were written"
        if f"{crc:08x}" != entry.get("crc32"):
            return f"{path}: CRC32 {crc:08x}, {entry.get('crc32')!r:.30} was written"
        return None

    problems = [found for found in parallel_map(work, sorted(entries), workers=workers) if found]
    for problem in problems[:_SHOWN]:
        print(problem)
    print(f"{len(entries) - len(problems):,} of {len(entries):,} files are as the manifest says")
    return 1 if problems else 0


def _require_torch(arithmetic: object) -> None:
    """Import torch now if it will be needed. Copying needs only numpy; casts and quantization need torch."""
    if arithmetic:
        import torch  # noqa: F401


def _quantized_lines(plan: Quantization | None) -> Iterator[str]:
    if plan is None:
        return
    kinds = Counter(weight.algorithm for weight in plan.weights if weight.algorithm)
    yield f"quantized    by {plan.recipe}: " + ", ".join(f"{n:,} weights {kind}" for kind, n in kinds.items())
    if plan.kept:
        yield (
            f"kept         {len(plan.kept):,} weights stay as they are: FP8 in the recipe, but no "
            f"--input-scales were given; first {plan.kept[0]}"
        )
    if plan.unused:
        yield f"unused       {len(plan.unused):,} of the given scales, first {plan.unused[0]}"


def _main_dtype(view: TensorSource) -> str:
    """Return the type of most elements."""
    found: Counter[str] = Counter()
    for tensor in view.tensors.values():
        found[tensor.dtype] += tensor.nbytes
    return found.most_common(1)[0][0]


def _cast(view: TensorSource, dtype: str | None, opened: Checkpoint, *, hf: bool) -> TensorSource:
    if dtype is None:
        return view
    kept = {
        t.name
        for mapping in opened.mappings
        if mapping.row.float32
        for t in (mapping.hf if hf else mapping.megatron)
    }
    return Cast(view, dtype, keep=kept.__contains__)


def _job_origin(opened: Checkpoint, options: Options) -> dict[str, object]:
    return {
        "source": os.fspath(opened.folder.absolute()),
        "source_kind": opened.kind,
        "model": opened.config.name,
        "dtype": options.dtype,
    }


def _plan_lines(opened: Checkpoint, target: Path, job: Job) -> list[str]:
    elements: Counter[str] = Counter()
    for tensor in job.source.tensors.values():
        elements[tensor.dtype] += tensor.nbytes // ITEM_SIZE[tensor.dtype]
    kinds = ", ".join(f"{count:,} in {dtype}" for dtype, count in elements.most_common())
    lines = [
        f"source       {_checkpoint_line(opened)}",
        f"weights      {len(job.source.tensors):,} tensors; elements {kinds}",
    ]
    padding = (opened.padded_vocab_size or 0) - opened.config.vocab_size
    if opened.vocabulary_guessed:
        lines.append(
            f"vocabulary   {opened.config.vocab_size:,} rows, all of them kept: how many are padding is not "
            "stored (--vocab-size N)"
        )
    elif padding > 0:
        lines.append(
            f"vocabulary   {padding:,} padded rows behind {opened.config.vocab_size:,} tokens are left out"
        )
    if opened.left_out:
        lines.append(
            "left out     " + ", ".join(f"{n:,} {what} tensors" for what, n in opened.left_out.items())
        )
    lines.append(
        f"target       {target}: {len(job.files) + len(job.small):,} files, {_size(job.length)}; "
        f"{_size(free_bytes(target))} are free"
    )
    if partial_of(target).exists():
        lines.append(f"continues    {partial_of(target)}")
    return lines


def _checkpoint_line(opened: Checkpoint) -> str:
    c = opened.config
    at = "" if opened.iteration is None else f", iteration {opened.iteration}"
    mtp = f" / MTP {c.mtp_pattern} x {c.mtp_num_blocks}" if c.has_mtp else ""
    return (
        f"{opened.folder} ({opened.kind}{at}): {c.name}, layers {c.pattern}{mtp}, hidden size {c.hidden_size}"
    )


def _size(length: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if length >= size:
            return f"{length / size:,.1f} {unit}"
    return f"{length:.0f} bytes"


class _ProgressLine:
    """A progress line: rewritten on a terminal, otherwise printed every ten seconds."""

    def __init__(self) -> None:
        self._shown, self._last = False, time.monotonic()

    def progress(self, at: Progress) -> None:
        """Show the progress of the job."""
        terminal = sys.stderr.isatty()
        if not terminal and time.monotonic() - self._last < 10:
            return
        self._last = time.monotonic()
        left = at.seconds_left
        text = f"{_size(at.done)} of {_size(at.total)}, {_size(at.rate)}/s" + (
            "" if left is None else f", {left:,.0f} s left"
        )
        print(
            f"\r{text:<70}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True
        )
        self._shown = terminal

    def end(self) -> None:
        """End the line."""
        if self._shown:
            print(file=sys.stderr)
        self._shown = False
