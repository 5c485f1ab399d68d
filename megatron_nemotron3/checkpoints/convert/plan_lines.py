"""What `nemotron3 convert` prints before it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.config_json import clamp_note
from megatron_nemotron3.checkpoints.convert.job import Job, partial_of
from megatron_nemotron3.checkpoints.convert.omni_config import TEXT, is_omni, part, pruning_note
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint, checkpoint_line
from megatron_nemotron3.checkpoints.convert.quantized_recipes import Quantization
from megatron_nemotron3.checkpoints.folders import free_bytes
from megatron_nemotron3.checkpoints.metadata import count_elements, elements_text
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.common.output import size_text


def into_lines(base: Checkpoint | None) -> list[str]:
    """Say what a part is put into."""
    return [] if base is None else [f"into         {checkpoint_line(base)}"]


def config_lines(opened: Checkpoint, data: Mapping[str, Any]) -> list[str]:
    """Say where a config.json makes others compute something else than Megatron."""
    text = part(data, TEXT) if is_omni(data) else None
    clamp = clamp_note(text or data) if "M" in opened.config.full_pattern else None
    pruning = pruning_note(data) if opened.omni else None
    notes = {"time steps   ": clamp, "video        ": pruning}
    return [start + note for start, note in notes.items() if note]


def quantized_lines(plan: Quantization | None) -> Iterator[str]:
    """Say what is quantized, and what is not."""
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


def plan_lines(opened: Checkpoint, target: Path, job: Job) -> list[str]:
    """Say what is read, left out and written."""
    kinds = elements_text(count_elements(job.source.tensors.values()))
    lines = [
        f"source       {checkpoint_line(opened)}",
        f"weights      {len(job.source.tensors):,} tensors; elements {kinds}",
    ]
    if opened.config.has_mtp:
        depths, blocks = opened.config.mtp_num_layers, opened.config.mtp_num_blocks
        lines.append(f"mtp          depths: {depths}, stored blocks: {blocks}; by {opened.mtp_source}")
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
    free = "" if shown(target) != str(target) else f"; {size_text(free_bytes(target))} are free"
    files = len(job.files) + len(job.small)
    lines.append(f"target       {shown(target)}: {files:,} files, {size_text(job.length)}{free}")
    if partial_of(target).exists():
        lines.append(f"continues    {partial_of(target)}")
    return lines
