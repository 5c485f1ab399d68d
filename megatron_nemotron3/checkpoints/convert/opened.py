"""An opened checkpoint of any kind, and what to say of it: what it is, what was lost, what others do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import config_json, inventory, omni_inventory
from megatron_nemotron3.checkpoints.convert.adapters import Merged, StoredAdapter
from megatron_nemotron3.checkpoints.convert.hf_folder import other_files
from megatron_nemotron3.checkpoints.convert.inventory import TensorMapping
from megatron_nemotron3.checkpoints.convert.omni_config import TEXT, part, pruning_note, text_part
from megatron_nemotron3.checkpoints.convert.omni_inventory import LANGUAGE
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.views import Cast, Converted, Selected
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.common.output import say
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig

EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint."""

    #: "torch_dist", "fsdp_dtensor" or "hugging face".
    kind: str
    folder: Path
    config: Nemotron3Config
    #: Weights only; Megatron's by plain name.
    weights: TensorSource
    mappings: tuple[TensorMapping, ...]
    #: Kind of tensors that are left out -> their number.
    left_out: Counter[str] = field(default_factory=Counter)
    iteration: int | None = None
    #: What says how many depths MTP has.
    mtp_source: str = ""
    #: The vocabulary size is unknown, and the padded size is used instead.
    vocabulary_guessed: bool = False
    #: The checkpoint's own LoRA adapter, or another's.
    adapter: StoredAdapter | None = None
    #: The model with encoders, of which `config` is the language model; None without encoders.
    omni: OmniConfig | None = None
    #: What its config.json says, for the tensors and the MTP that it is opened with; None for Megatron's.
    stated: Mapping[str, Any] | None = None
    #: What is kept of the Hugging Face folder that a Megatron checkpoint comes from.
    origin: Path | None = None
    #: Where its tokenizer may be.
    tokenizers: tuple[Path, ...] = ()
    #: The checkpoint that MTP was taken from, if another.
    mtp_from: Path | None = None
    #: Patterns of tensors that may be left out, and that no tensor has.
    unmatched: tuple[str, ...] = ()
    #: Tensors of FP32 that were stored in fewer bits, and are read as FP32 -> their stored type.
    narrow: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.omni.name if self.omni else self.config.name

    @property
    def padded_vocab_size(self) -> int | None:
        """Rows of Megatron's embedding; None for a Hugging Face checkpoint."""
        name = LANGUAGE + EMBEDDING if self.omni else EMBEDDING
        return self.weights.tensors[name].shape[0] if self.kind != "hugging face" else None

    @property
    def float32(self) -> list[str]:
        """Names of the tensors that are FP32 whatever the model's type: the expert bias."""
        rows = [one for one in self.mappings if one.row.float32 and one.row.part == "E"]
        return [t.name for one in rows for t in (one.hf if self.kind == "hugging face" else one.megatron)]

    def with_float32(self) -> Checkpoint:
        """Return the checkpoint with the tensors of `float32` in this type, if they are in a narrower one."""
        types = {name: self.weights.tensors[name].dtype for name in self.float32}
        narrow = {name: dtype for name, dtype in types.items() if ITEM_SIZE[dtype] < ITEM_SIZE["float32"]}
        if not narrow:
            return self
        wide = Cast(self.weights, "float32", keep=lambda name: name not in narrow)
        return replace(self, weights=wide, narrow=narrow)

    def language_part(self) -> Checkpoint:
        """Return the language model of a model with encoders as a checkpoint of its own."""
        if self.omni is None:
            raise ValueError(f"{self.folder}: it has no encoders: the language model is all of it")
        names = {n.removeprefix(LANGUAGE): n for n in self.weights.tensors if n.startswith(LANGUAGE)}
        if self.kind == "hugging face":
            mappings = list(inventory.mappings(self.config))
        else:
            rows = self.padded_vocab_size
            mappings = inventory.mappings_of(self.config, names, padded_vocab_size=rows)
        return replace(
            self,
            weights=Selected(self.weights, names),
            stated=part(self.stated, TEXT) if self.stated else None,
            narrow={new: self.narrow[old] for new, old in names.items() if old in self.narrow},
            mappings=tuple(mappings),
            left_out=self.left_out + Counter(encoder=len(self.weights.tensors) - len(names)),
            omni=None,
        )

    def to_megatron(self, padded_vocab_size: int) -> list[TensorMapping]:
        """Return the mappings from a Hugging Face checkpoint to the keys that Megatron writes."""
        return omni_inventory.mappings(self.config, self.omni, self.weights.tensors, padded_vocab_size)

    def hf_view(self) -> TensorSource:
        """Return the weights under their Hugging Face names, the adapter merged into them."""
        view = self.weights
        if self.kind != "hugging face":
            view = Converted(view, self.mappings, to_hf=True)
        return view if self.adapter is None else Merged(view, self.adapter)


def checkpoint_line(opened: Checkpoint) -> str:
    """Describe a checkpoint: folder, format, model, layers."""
    c = opened.config
    at = "" if opened.iteration is None else f", iteration {opened.iteration}"
    depths = f", {c.mtp_num_layers} depths" if c.mtp_num_layers != c.mtp_num_blocks else ""
    mtp = f" / MTP {c.mtp_pattern} x {c.mtp_num_blocks}{depths}" if c.has_mtp else ""
    encoders = ""
    if opened.omni is not None:
        vision, sound = opened.omni.vision, opened.omni.sound
        second = "no sound" if sound is None else f"parakeet {sound.num_layers} x {sound.hidden_size}"
        encoders = f" behind encoders radio {vision.num_layers} x {vision.hidden_size}, {second}"
    lora = f", with a LoRA adapter of {len(opened.adapter.stems):,} matrices" if opened.adapter else ""
    return (
        f"{shown(opened.folder)} ({opened.kind}{at}): {opened.name}, layers {c.pattern}{mtp}{encoders}, "
        f"hidden size {c.hidden_size}{lora}"
    )


def checkpoint_facts(opened: Checkpoint) -> dict[str, Any]:
    """What `checkpoint_line` says, for a JSON document."""
    c = opened.config
    return {
        "checkpoint": shown(opened.folder),
        "kind": opened.kind,
        "iteration": opened.iteration,
        "model": opened.name,
        "pattern": c.pattern,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "mtp_num_layers": c.mtp_num_layers,
        "mtp_blocks": c.mtp_num_blocks if c.has_mtp else 0,
        "adapter_matrices": len(opened.adapter.stems) if opened.adapter else 0,
        **({"encoders": json.loads(opened.omni.encoders_json())} if opened.omni else {}),
    }


def say_notes(notes: Iterable[str], begin: str = "") -> None:
    """Print notes, a line each; in the JSON document they are a list of texts."""
    for note in notes:
        say(begin + note, notes=[" ".join(note.split())])


def notes_of(opened: Checkpoint, data: Mapping[str, Any]) -> list[str]:
    """Return what is to be known of a checkpoint that is read, and of a config.json of its model."""
    notes = unmatched_notes(opened.unmatched) + _file_notes(opened)
    return notes + bias_notes(opened) + _config_notes(opened, data)


def unmatched_notes(patterns: Iterable[str]) -> list[str]:
    """Name the patterns of --allow-unused that have no effect."""
    return [f"unmatched    --allow-unused {pattern!r}: no tensor is called so" for pattern in patterns]


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


def _file_notes(opened: Checkpoint) -> list[str]:
    """Name the safetensors files that are not read."""
    notes = []
    for name, mtp in other_files(opened.folder, opened.weights.files).items():
        cure = f" (its {mtp:,} tensors of MTP: --mtp-from {shown(opened.folder / name)})" if mtp else ""
        notes.append(f"not read     {name}: no index lists it{cure}")
    return notes if opened.kind == "hugging face" else []


def _config_notes(opened: Checkpoint, data: Mapping[str, Any]) -> list[str]:
    """Return where a config.json makes others compute differently than Megatron, and its unread keys."""
    text = text_part(data)
    notes = {
        "config.json  ": config_json.unread_note(text),
        "time steps   ": config_json.clamp_note(text) if "M" in opened.config.full_pattern else None,
        "video        ": pruning_note(data) if opened.omni else None,
    }
    return [start + note for start, note in notes.items() if note]
