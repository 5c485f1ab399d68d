"""`nemotron3 show`: the numbers of a model of the catalog, of a file, or of a checkpoint's folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.options import add_command, json_flag
from megatron_nemotron3.common.output import print_json
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import ModelOptions, chosen_model, chosen_omni
from megatron_nemotron3.models.omni import OmniConfig


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of `nemotron3 show`."""

    which: ModelOptions
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 show`."""
    add_command(commands.add_parser("show"), ShowOptions, show_command)


def show_command(options: ShowOptions) -> int:
    """Print a model's numbers. Exit status 0."""
    from megatron_nemotron3.models.show import describe, describe_omni, render, render_omni

    found, stored = _found(options.which)
    if options.json:
        facts = describe_omni(found) if isinstance(found, OmniConfig) else describe(found)
        print_json(facts | {"stored_bytes": stored} if stored else facts)
        return 0
    print(render_omni(found) if isinstance(found, OmniConfig) else render(found))
    for dtype, size in stored.items():
        print(f"{'stored':<11}{size:,} bytes of {dtype}")
    return 0


def _found(which: ModelOptions) -> tuple[Nemotron3Config | OmniConfig, dict[str, int]]:
    """The model, and of a checkpoint the bytes of each type that it has."""
    name = which.name
    try:
        return chosen_omni(which) or chosen_model(which), {}
    except ValueError:
        if name is None or which.model is not None or Path(name).is_file():
            raise
        if "/" not in name and not Path(name).is_dir():
            raise
    from megatron_nemotron3.checkpoints.convert.hf_folder import open_hf
    from megatron_nemotron3.checkpoints.remote import local, place
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint

    if which.tiny:
        raise ValueError(f"--tiny does not go with the folder {name}: drop it")
    with local(place(name), download=False) as folder:
        found = find_checkpoint(folder)
        opened, stored = found.open(None), Counter[str]()
        # Packed weights are opened as BF16.
        source = open_hf(found.checkpoint) if opened.kind == "hugging face" else opened.weights
        for tensor in source.tensors.values():
            stored[tensor.dtype] += tensor.nbytes
        return opened.omni or opened.config, dict(stored.most_common())
