"""`nemotron3 show`, and the options by which every command names a model. Standard library only."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatron_nemotron3.models.catalog import get, names
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.tiny import tiny


def register(commands: Any) -> None:
    """Add `nemotron3 show`."""
    show = commands.add_parser(
        "show", help="print the sizes of a model", description="Print the sizes of a model."
    )
    add_model(show)
    show.add_argument("--json", action="store_true", help="machine-readable")
    show.set_defaults(run=show_command)


def add_model(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add NAME and --tiny, which `chosen_model` reads."""
    command.add_argument("name", metavar="NAME", nargs=None if required else "?", help=", ".join(names()))
    command.add_argument("--tiny", action="store_true", help="use the small form of the model")


def chosen_model(options: argparse.Namespace) -> Nemotron3Config:
    """Return the model of NAME and --tiny.

    Raises:
        ValueError: there is no model of that name.
    """
    config = get(options.name)
    return tiny(config) if options.tiny else config


def add_stored_model(command: argparse.ArgumentParser) -> None:
    """Add --model and --tiny, for commands that read a checkpoint; `stored_model` reads them."""
    command.add_argument(
        "--model", metavar="NAME", help=f"{', '.join(names())}; default: as the checkpoint says"
    )
    command.add_argument("--tiny", action="store_true", help="use the small form of --model")


def stored_model(options: argparse.Namespace) -> Nemotron3Config | None:
    """Return the model of --model and --tiny, or None if the checkpoint is to say which model it holds.

    Raises:
        ValueError: --tiny without --model, or there is no model of that name.
    """
    if options.model is None:
        if options.tiny:
            raise ValueError("--tiny requires --model NAME")
        return None
    config = get(options.model)
    return tiny(config) if options.tiny else config


def show_command(options: argparse.Namespace) -> int:
    """Print a model's numbers. Exit status 0.

    Raises:
        ValueError: there is no model of that name.
    """
    from megatron_nemotron3.models.show import describe, render

    config = chosen_model(options)
    print(json.dumps(describe(config), indent=2) if options.json else render(config))
    return 0
