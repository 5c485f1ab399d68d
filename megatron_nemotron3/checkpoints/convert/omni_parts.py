"""`--only language` and `--into`: the language model of a model with encoders, taken out or put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import omni_inventory
from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.hf_folder import INDEX, SINGLE, open_hf
from megatron_nemotron3.checkpoints.convert.omni_inventory import LANGUAGE, constants_of
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.views import InMemory, Joined, Selected
from megatron_nemotron3.models.omni import OmniConfig


def check_options(opened: Checkpoint, options: Any) -> Checkpoint:
    """Return what is to be converted: the checkpoint, or with --only language its language model."""
    if options.into is not None and options.only is None:
        raise ValueError("--into: it says what a part is put into: give --only language")
    if options.only is not None and (opened.omni is not None or options.into is None):
        opened = opened.language_part()
    written = options.into is not None or opened.omni is not None
    for name in ("adapter", "merge_adapter", "adapter_only", "quantize", "dequantize"):
        if written and getattr(options, name, None):
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: it is for language models, and what is written has encoders")
    return opened


def open_into(folder: Path | None, *, megatron: bool) -> Checkpoint | None:
    """Open the checkpoint of --into."""
    if folder is None:
        return None
    opened = open_checkpoint(folder, omni=True)
    if opened.omni is None:
        raise ValueError(f"--into {folder}: it is a language model, without encoders")
    if megatron == (opened.kind == "hugging face"):
        kinds = ["Hugging Face folder", "Megatron checkpoint"]
        raise ValueError(
            f"--into {folder}: it is a {kinds[not megatron]}, and a {kinds[megatron]} is written"
        )
    return opened


def in_place(
    view: TensorSource, opened: Checkpoint, base: Checkpoint | None
) -> tuple[TensorSource, OmniConfig | None]:
    """Return what is written of a view, and the model with encoders that it is, if any."""
    if base is None:
        return view, opened.omni
    assert base.omni is not None
    stored: TensorSource = open_hf(base.folder) if base.kind == "hugging face" else base.weights
    for name, tensor in view.tensors.items():
        before = stored.tensors.get(LANGUAGE + name)  # none: Megatron has other spellings of the same tensors
        if before is not None and (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"--into {base.folder}: {LANGUAGE + name} is {before.dtype} {list(before.shape)} there, "
                f"{tensor.dtype} {list(tensor.shape)} is put in: give --dtype, or another model"
            )
    return omni_inventory.with_language(view, stored), base.omni.but(language=opened.config)


def with_other_tensors(
    view: TensorSource, opened: Checkpoint, reference: Path | None, dtype: str
) -> tuple[TensorSource, list[str]]:
    """Return the view with the tensors that only Hugging Face folders have, and what to say of them.

    The constants of the release come from the checkpoint or the reference. Without them, the folder gets what
    transformers saves.
    """
    if opened.omni is None or constants_of(view.tensors):
        return view, []
    if reference is not None and any((reference / name).exists() for name in (INDEX, SINGLE)):
        source = open_hf(reference)
        if found := constants_of(source.tensors):
            return Joined(view, Selected(source, {name: name for name in found})), []
    made = InMemory(view.folder, omni_inventory.made(opened.omni, dtype))
    line = (
        "constants    the release's tensors of preprocessing are not in the checkpoint; --reference with a "
        "folder that has them copies them (transformers needs none)"
    )
    return Joined(view, made), [line]
