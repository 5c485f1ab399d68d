"""What to say of a checkpoint, a line each: what others compute differently, and what was lost before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.hf_folder import other_files
from megatron_nemotron3.checkpoints.convert.omni_config import TEXT, is_omni, part, pruning_note
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.remote import shown


def file_notes(opened: Checkpoint) -> list[str]:
    """Name the safetensors files that are not read."""
    notes = []
    for name, mtp in other_files(opened.folder, opened.weights.files).items():
        cure = f" (its {mtp:,} tensors of MTP: --mtp-from {shown(opened.folder / name)})" if mtp else ""
        notes.append(f"not read     {name}: no index lists it{cure}")
    return notes if opened.kind == "hugging face" else []


def config_notes(opened: Checkpoint, data: Mapping[str, Any]) -> list[str]:
    """Return where a config.json makes others compute differently than Megatron, and its unread keys."""
    text = (part(data, TEXT) if is_omni(data) else None) or data
    notes = {
        "config.json  ": config_json.unread_note(text),
        "time steps   ": config_json.clamp_note(text) if "M" in opened.config.full_pattern else None,
        "video        ": pruning_note(data) if opened.omni else None,
    }
    return [start + note for start, note in notes.items() if note]
