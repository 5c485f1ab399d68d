"""`nemotron3 show`, and the options by which every command names a model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.common.options import add_command, argument, flag, json_flag, option
from megatron_nemotron3.common.output import print_json
from megatron_nemotron3.models.catalog import names
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig, get_omni
from megatron_nemotron3.models.tiny import TINY_SUFFIX, tiny

_MODEL = "a name of the catalog, or FILE.json with a model of your own"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """NAME or --model, and --tiny, for `chosen_model`."""

    name: str | None = argument(", ".join(names()), "NAME", default=None)
    model: str | None = option(f"{_MODEL}; instead of NAME", "MODEL")
    tiny: bool = flag("use the small form of the model")


@dataclass(frozen=True, kw_only=True)
class StoredModelOptions:
    """--model and --tiny of commands that read a checkpoint, for `stored_model`."""

    model: str | None = option(f"{_MODEL}; default: as the checkpoint says", "MODEL")
    tiny: bool = flag("use the small form of the model")


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of `nemotron3 show`."""

    which: ModelOptions
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 show`."""
    add_command(commands.add_parser("show"), ShowOptions, show_command)


def names_model(options: ModelOptions | argparse.Namespace) -> bool:
    """Whether the options name a model for `chosen_model`."""
    return options.name is not None or options.model is not None


def chosen_model(options: ModelOptions | argparse.Namespace) -> Nemotron3Config:
    """Return the model of NAME or --model, and --tiny."""
    if options.name is not None and options.model is not None:
        raise ValueError(f"NAME {options.name} and --model {options.model} both name a model: give one")
    if (text := options.name if options.model is None else options.model) is None:
        raise ValueError(f"give the NAME of a model ({', '.join(names())}), or --model FILE")
    return _sized(text, options.tiny)


def chosen_omni(options: ModelOptions | argparse.Namespace) -> OmniConfig | None:
    """Return the model with encoders of NAME and --tiny; None if NAME is none of them."""
    if options.name is None or options.model is not None:
        return None
    return get_omni(options.name + (TINY_SUFFIX if options.tiny else ""))


def stored_model(options: StoredModelOptions | argparse.Namespace) -> Nemotron3Config | None:
    """Return the model of --model and --tiny; None without them: the checkpoint then names its model."""
    if options.model is None:
        if options.tiny:
            raise ValueError("--tiny requires --model NAME")
        return None
    return _sized(options.model, options.tiny)


def _sized(text: str, small: bool) -> Nemotron3Config:
    from megatron_nemotron3.models.own import model

    config = model(text)
    return tiny(config) if small else config


def show_command(options: ShowOptions) -> int:
    """Print a model's numbers. Exit status 0."""
    from megatron_nemotron3.models.show import describe, describe_omni, render, render_omni

    if (omni := chosen_omni(options.which)) is not None:
        print_json(describe_omni(omni)) if options.json else print(render_omni(omni))
    else:
        config = chosen_model(options.which)
        print_json(describe(config)) if options.json else print(render(config))
    return 0
