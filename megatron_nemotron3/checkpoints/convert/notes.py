"""What to say of a checkpoint, a line each: what others compute differently, and what was lost before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.hf_folder import other_files
from megatron_nemotron3.checkpoints.convert.omni_config import pruning_note, text_part
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE
from megatron_nemotron3.checkpoints.remote import shown


def bias_notes(opened: Checkpoint) -> list[str]:
    """Say what was lost of the expert bias, which is FP32: its last bits, or all of it. It is read."""
    distinct, zeros = {}, []
    for name in opened.float32:
        values = opened.weights.read(name)
        if not values.any():
            zeros.append(name)
        elif name in opened.narrow:
            distinct[name] = (values.unique().numel(), values.numel())
    notes = []
    if distinct:
        least = min(distinct, key=lambda name: distinct[name])
        (number, size), dtype = distinct[least], opened.narrow[least]
        notes.append(
            f"expert bias  {dtype} instead of float32 in {len(distinct):,} of {len(opened.float32):,} "
            f"tensors: {number:,} distinct of {size:,} values in {least}; what was rounded away is lost"
        )
    if zeros:
        notes.append(
            f"expert bias  all zeros in {len(zeros):,} of {len(opened.float32):,} tensors, first {zeros[0]}: "
            "never updated, or lost"
        )
    return notes


def narrower_notes(a: TensorSource, b: TensorSource) -> list[str]:
    """Say which side of a comparison has tensors in fewer bits, with the distinct values of the smallest."""
    notes = []
    for side, one, other in (("a", a, b), ("b", b, a)):
        found = [
            name
            for name, tensor in one.tensors.items()
            if name in other.tensors and ITEM_SIZE[tensor.dtype] < ITEM_SIZE[other.tensors[name].dtype]
        ]
        if not found:
            continue
        name = min(found, key=lambda name: one.tensors[name].nbytes)
        mine, theirs = (x.read(name).unique().numel() for x in (one, other))
        notes.append(
            f"narrower     {side} has {len(found):,} tensors in fewer bits: {name} is "
            f"{one.tensors[name].dtype} for {other.tensors[name].dtype}, with {mine:,} distinct values for "
            f"{theirs:,}"
        )
    return notes


def file_notes(opened: Checkpoint) -> list[str]:
    """Name the safetensors files that are not read."""
    notes = []
    for name, mtp in other_files(opened.folder, opened.weights.files).items():
        cure = f" (its {mtp:,} tensors of MTP: --mtp-from {shown(opened.folder / name)})" if mtp else ""
        notes.append(f"not read     {name}: no index lists it{cure}")
    return notes if opened.kind == "hugging face" else []


def config_notes(opened: Checkpoint, data: Mapping[str, Any]) -> list[str]:
    """Return where a config.json makes others compute differently than Megatron, and its unread keys."""
    text = text_part(data)
    notes = {
        "config.json  ": config_json.unread_note(text),
        "time steps   ": config_json.clamp_note(text) if "M" in opened.config.full_pattern else None,
        "video        ": pruning_note(data) if opened.omni else None,
    }
    return [start + note for start, note in notes.items() if note]
