"""`nemotron3 show`: the numbers of a model of the catalog, of a file, or of a checkpoint's folder."""

from __future__ import annotations

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

    found = _found(options.which)
    if isinstance(found, OmniConfig):
        print_json(describe_omni(found)) if options.json else print(render_omni(found))
    else:
        print_json(describe(found)) if options.json else print(render(found))
    return 0


def _found(which: ModelOptions) -> Nemotron3Config | OmniConfig:
    name = which.name
    try:
        return chosen_omni(which) or chosen_model(which)
    except ValueError:
        if name is None or which.model is not None or not Path(name).is_dir():
            raise
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint

    if which.tiny:
        raise ValueError(f"--tiny does not go with the folder {name}: drop it")
    opened = find_checkpoint(Path(name)).open(None)
    return opened.omni or opened.config
