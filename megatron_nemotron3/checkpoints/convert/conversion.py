"""Convert checkpoints, and print the plan, the progress and the result."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import config_json, from_hf, inventory, omni_parts, to_hf
from megatron_nemotron3.checkpoints.convert.adapter_options import (
    adapter_folder,
    adapter_state,
    megatron_adapter,
    with_adapter,
)
from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face, open_megatron
from megatron_nemotron3.checkpoints.convert.hf_folder import CONFIG
from megatron_nemotron3.checkpoints.convert.job import Job, check_target, partial_of, run
from megatron_nemotron3.checkpoints.convert.job_options import (
    ConvertOptions,
    FromHfOptions,
    ToHfOptions,
    model_of,
)
from megatron_nemotron3.checkpoints.convert.next_step import next_command
from megatron_nemotron3.checkpoints.convert.omni_config import text_part
from megatron_nemotron3.checkpoints.convert.opened import (
    Checkpoint,
    checkpoint_facts,
    checkpoint_line,
    notes_of,
    say_notes,
)
from megatron_nemotron3.checkpoints.convert.origin import (
    base_config,
    check_reference,
    stated_number,
    to_copy,
    to_keep,
)
from megatron_nemotron3.checkpoints.convert.quantized import quantization, quantized_lines, read_scales
from megatron_nemotron3.checkpoints.convert.quantized_views import Quantized
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.special_tokens import token_line
from megatron_nemotron3.checkpoints.convert.streams import FilePlan
from megatron_nemotron3.checkpoints.convert.upload import check_url, upload
from megatron_nemotron3.checkpoints.convert.verify import require_manifest
from megatron_nemotron3.checkpoints.convert.views import Cast, Converted, Joined
from megatron_nemotron3.checkpoints.folders import MANIFEST, free_bytes, locate
from megatron_nemotron3.checkpoints.hub import push, require_hub
from megatron_nemotron3.checkpoints.metadata import count_elements, elements_text
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.common.output import BYTES, Bar, count, say, size_text
from megatron_nemotron3.common.processes import bulk_work
from megatron_nemotron3.models.lora import ARGUMENT as LORA_ARGUMENT
from megatron_nemotron3.models.omni import ARGUMENT as ENCODERS

#: Options that do not change what is written.
_NO_EFFECT = ("workers", "dry_run", "json", "check_logits", "url", "which", "shard_size", "push_to_hub")


@bulk_work()
def convert_to_hf(source: Path, target: Path, options: ToHfOptions) -> int:
    """Convert a Megatron checkpoint to a Hugging Face folder. Returns the exit status."""
    options = replace(options, config=options.config or model_of(options.which))
    _check_target(target, options)
    check_reference(options.reference)
    if options.push_to_hub is not None:
        if options.url is not None:
            raise ValueError(
                f"--push-to-hub: convert to a local folder, not to {options.url}, or leave it out"
            )
        require_hub(options.push_to_hub)
    base = omni_parts.open_into(options.into, megatron=False)
    vocab_size, reference = options.vocab_size, options.reference or options.into
    if locate(source).kind == "hugging face":
        raise ValueError(f"{source}: it is a Hugging Face folder: use `nemotron3 convert from-hf`")
    if vocab_size is None and reference is not None and (reference / CONFIG).exists():
        vocab_size = stated_number(reference, "vocab_size")
    opened = open_megatron(
        source,
        model=options.config,
        iteration=options.iteration,
        vocab_size=vocab_size,
        from_masters=options.from_optimizer_master,
        allow_unused=options.allow_unused,
        alpha=options.lora_alpha,
        omni=True,
    )
    opened = omni_parts.check_options(opened, options)
    _check_opened(opened, options)
    opened = with_adapter(opened, options)
    if options.adapter_only:
        view, files, small = adapter_folder(opened, options)
        if _run_job(opened, target, _job(opened, target, view, (files, small), options), options, ()):
            _push(target, options)
        return 0
    if options.base_model is not None:
        raise ValueError("--base-model: it goes with --adapter-only")
    view = opened.hf_view()
    dtype = _main_dtype(view)
    view = _cast(view, options.dtype, opened, hf=True)
    plan = scales = None
    if options.quantize is not None:
        if options.check_logits is not None:
            raise ValueError(
                "--check-logits: quantized weights give other logits: leave out --quantize or --check-logits"
            )
        scales = read_scales(options.input_scales) if options.input_scales is not None else None
        plan = quantization(opened.config, options.quantize, scales, options.dtype or dtype)
        view = Quantized(view, plan)
    elif options.input_scales is not None:
        raise ValueError("--input-scales: it needs --quantize")
    view, lines = omni_parts.with_other_tensors(view, opened, reference, options.dtype or dtype)
    view, written = omni_parts.in_place(view, opened, base)
    files = to_hf.files(view.tensors, options.shard_bytes)
    stated, line = base_config(written or opened.config, reference, opened.origin)
    copied, line_of_files = to_copy(reference, opened)
    small = to_hf.small_files(
        written or opened.config,
        files,
        copied=copied,
        base=stated,
        dtype=options.dtype or dtype,
        quantization=plan,
    )
    data = json.loads(small[CONFIG])
    ids = token_line(text_part(data)) if stated is None else ""
    lines += [*filter(None, (line, ids, line_of_files)), *_note_lines(opened, base, data)]
    notes = [*quantized_lines(plan), *lines]
    job = _job(opened, target, view, (files, small), options, scales)
    if not _run_job(opened, target, job, options, notes):
        return 0
    status = 0
    if options.check_logits is not None:
        made = open_hugging_face(target, model=opened.config, omni=True)
        status = _compare_logits(options.check_logits, opened, made, options.dtype)
    if status == 0:
        _push(target, options)
    return status


def _push(target: Path, options: ToHfOptions) -> None:
    if options.push_to_hub is not None:
        address = push(target, options.push_to_hub)
        say(f"pushed       {address}", pushed=address)


@bulk_work()
def convert_from_hf(source: Path, target: Path, options: FromHfOptions) -> int:
    """Convert a Hugging Face folder to a Megatron checkpoint. Returns the exit status."""
    options = replace(options, config=options.config or model_of(options.which))
    _check_target(target, options)
    divisor = options.make_vocab_size_divisible_by
    if divisor < 1:
        raise ValueError(f"--make-vocab-size-divisible-by {divisor}: use 1 or more")
    if options.dequantize and options.check_logits is not None:
        raise ValueError(
            "--check-logits: transformers does not compute with quantized weights: leave out --dequantize or "
            "--check-logits"
        )
    if locate(source).kind != "hugging face":
        raise ValueError(f"{source}: it is a Megatron checkpoint: use `nemotron3 convert to-hf`")
    base = omni_parts.open_into(options.into, megatron=True)
    opened = open_hugging_face(
        source,
        model=options.config,
        allow_unused=options.allow_unused,
        dequantize=options.dequantize,
        mtp_num_layers=options.mtp.mtp_num_layers,
        mtp_from=options.mtp.mtp_from,
        omni=True,
    )
    opened = omni_parts.check_options(opened, options)
    _check_opened(opened, options)
    rows = from_hf.pad_vocab_size(opened.config.vocab_size, divisor)
    if base is not None:
        config_json.check_same_model(opened.config, base.config)
        rows = base.padded_vocab_size or rows
    dtype = options.dtype or _main_dtype(opened.weights)
    opened = with_adapter(opened, options)
    weights = _cast(
        opened.hf_view() if options.merge_adapter else opened.weights, options.dtype, opened, hf=True
    )
    found = opened.to_megatron(rows)
    arguments: dict[str, str] = {}
    if opened.adapter is not None and not options.merge_adapter:
        arguments[LORA_ARGUMENT], of_adapter = megatron_adapter(opened.adapter, found)
        found += of_adapter
        weights = Joined(weights, _cast(opened.adapter.tensors, options.dtype, opened, hf=True))
    view, written = omni_parts.in_place(Converted(weights, found, to_hf=False), opened, base)
    if written is not None:
        arguments[ENCODERS] = written.encoders_json()
    folder = from_hf.plan(
        view,
        opened.config,
        padded_vocab_size=rows,
        dtype=dtype,
        limit=options.shard_bytes,
        arguments=arguments,
    )
    kept, lines = to_keep(opened, base)
    job = replace(
        _job(opened, target, view, (folder.files, kept | folder.small), options), index=folder.index
    )
    notes = lines + _note_lines(opened, base, opened.stated or {})
    notes += filter(None, [None if options.dry_run else require_manifest(source, options.workers)])
    if not _run_job(opened, target, job, options, notes) or options.check_logits is None:
        return 0
    made = open_megatron(target, model=opened.omni or opened.config, omni=True)
    return _compare_logits(options.check_logits, opened, made, options.dtype)


def _compare_logits(tokens: int, opened: Checkpoint, made: Checkpoint, dtype: str | None) -> int:
    """Compare the logits of the language models of both sides. Returns the exit status."""
    from megatron_nemotron3.checkpoints.convert.logits.compare import LogitsCheckOptions, check_logits

    opened, made = (one if one.omni is None else one.language_part() for one in (opened, made))
    if opened.kind == "hugging face":
        megatron, hugging_face = made.weights, _cast(opened.weights, dtype, opened, hf=True)
    else:
        megatron, hugging_face = _cast(opened.weights, dtype, opened, hf=False), made.weights
    report = check_logits(megatron, hugging_face, opened.config, LogitsCheckOptions(tokens))
    heads = [{**asdict(one), "tolerance": one.tolerance} for one in report.logits]
    say(logits={"equal": report.passed, "problems": report.problems, "heads": heads})
    return 0 if report.passed else 1


def _check_opened(opened: Checkpoint, options: ConvertOptions) -> None:
    least = opened.config.mtp_num_blocks + 2
    if options.check_logits is not None and options.check_logits < least:
        raise ValueError(f"--check-logits {options.check_logits}: give {least} or more")
    if options.lora_alpha is not None and opened.adapter is None:
        raise ValueError(f"--lora-alpha: {opened.folder} has no LoRA adapter: leave it out")
    if options.dtype is None:
        types = {
            name: tensor.dtype
            for name, tensor in opened.weights.tensors.items()
            if opened.omni is None or tensor.dtype in inventory.WEIGHT_TYPES
        }
        inventory.check_types(opened.folder, types, alike=True)


def _check_target(target: Path, options: ConvertOptions) -> None:
    check_target(target)
    if options.url is not None:
        if options.check_logits is not None:
            raise ValueError("--check-logits: convert to a local folder, or leave it out")
        check_url(options.url)


def _note_lines(opened: Checkpoint, base: Checkpoint | None, data: Mapping[str, Any]) -> list[str]:
    """Say what a part is put into, and what a config.json says that matters."""
    into = [] if base is None else [f"into         {checkpoint_line(base)}"]
    return into + notes_of(opened, data)


def _say_plan(opened: Checkpoint, target: Path, job: Job, options: ConvertOptions) -> None:
    """Say what is read, left out and written."""
    tensors, elements = len(job.source.tensors), count_elements(job.source.tensors.values())
    say(
        f"source       {checkpoint_line(opened)}",
        source=checkpoint_facts(opened),
        target=options.url or str(target),
    )
    say(
        f"weights      {count(tensors, 'tensor')}; elements {elements_text(elements)}",
        tensors=tensors,
        elements=elements,
    )
    if opened.config.has_mtp:
        depths, blocks = opened.config.mtp_num_layers, opened.config.mtp_num_blocks
        say(f"mtp          depths: {depths}, stored blocks: {blocks}; by {opened.mtp_source}")
    if opened.mtp_from is not None:
        say(f"mtp          its tensors are those of {shown(opened.mtp_from)}")
    tokens, rows = opened.config.vocab_size, opened.padded_vocab_size
    line = None
    if opened.vocabulary_guessed:
        line = f"{tokens:,} rows, all of them kept: how many are padding is not stored (--vocab-size N)"
    elif rows is not None and rows > tokens:
        line = f"{rows - tokens:,} padded rows behind {tokens:,} tokens are left out"
    say(line and f"vocabulary   {line}", vocabulary_guessed=opened.vocabulary_guessed, padded_vocab_size=rows)
    line = ", ".join(f"{n:,} {what} tensors" for what, n in opened.left_out.items())
    say(f"left out     {line}" if line else None, left_out=dict(opened.left_out))
    free = "" if shown(target) != str(target) else f"; {size_text(free_bytes(target))} are free"
    files = len(job.files) + len(job.small)
    say(
        f"target       {shown(target)}: {count(files, 'file')}, {size_text(job.length)}{free}",
        files=files,
        bytes=job.length,
        written=False,
    )
    if partial_of(target).exists():
        say(f"continues    {partial_of(target)}")


def _run_job(
    opened: Checkpoint, target: Path, job: Job, options: ConvertOptions, notes: Iterable[str]
) -> bool:
    """Print the notes and the plan, and write the folder. Returns whether it was written."""
    say_notes(notes)
    _say_plan(opened, target, job, options)
    if options.dry_run:
        say("dry run      nothing was written")
        return False
    sys.stdout.flush()
    started = time.monotonic()
    with Bar("convert", BYTES) as bar:

        def report(at: Any) -> None:
            bar.to(at.done, at.total, begun=at.begun)

        if options.url is None:
            run(job, workers=options.workers, report=report)
        else:
            upload(job, options.url, report=report)
    seconds = time.monotonic() - started
    say(
        f"written      {size_text(job.length)} in {seconds:.1f} s; {shown(target / MANIFEST)} has the CRC32 "
        "of each file",
        written=True,
        seconds=seconds,
        manifest=shown(target / MANIFEST),
    )
    if options.check_logits is None:
        after = next_command(opened, target, job.source, options, cast=_is_cast(opened, options.dtype))
        say(after and f"next         {after}")
    return True


def _main_dtype(view: TensorSource) -> str:
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
        for t in (mapping.hf if hf else mapping.megatron)
        if mapping.row.float32 or t.dtype not in inventory.WEIGHT_TYPES
    }
    return Cast(view, dtype, keep=kept.__contains__)


def _is_cast(opened: Checkpoint, dtype: str | None) -> bool:
    """Whether `dtype` is another type than a weight's."""
    cast = _cast(opened.weights, dtype, opened, hf=opened.kind == "hugging face").tensors
    return any(tensor.dtype != cast[name].dtype for name, tensor in opened.weights.tensors.items())


def _job_options(options: ConvertOptions, scales: Mapping[str, float] | None = None) -> dict[str, object]:
    """Return every option that may change what is written, and the content of the scale file."""
    values = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in _NO_EFFECT}
    return {**values, "shard_bytes": options.shard_bytes, "scales": scales}


def _job(
    opened: Checkpoint,
    target: Path,
    view: TensorSource,
    plan: tuple[Sequence[FilePlan], Mapping[str, bytes]],
    options: ConvertOptions,
    scales: Mapping[str, float] | None = None,
) -> Job:
    files, small = plan
    origin: dict[str, object] = {
        "source": shown(opened.folder.absolute()),
        "source_kind": opened.kind,
        "model": opened.name,
        "dtype": options.dtype,
    }
    if options.into is not None:
        origin["into"] = shown(options.into.absolute())
    if opened.mtp_from is not None:
        origin["mtp_from"] = shown(opened.mtp_from.absolute())
    if options.adapter is not None:
        origin["adapter"] = adapter_state(options.adapter)
    return Job(
        target,
        view,
        files,
        small,
        origin=origin,
        options=_job_options(options, scales),
        finite=not options.allow_nonfinite,
    )
