"""Options of a command that reads the script of an existing launch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence

from megatron_nemotron3.common.files import read_outside

#: Longest script that is read, in bytes.
_LIMIT = 16 << 20


def add_set(command: argparse._ActionsContainer, script: str) -> None:
    """Add --set, for a command that reads a script; `variables` reads it."""
    command.add_argument(
        "--set",
        metavar="VARIABLE=VALUE",
        action="append",
        default=[],
        help=f"value of a variable of the script ({script}); may be repeated",
    )


def given_options(
    options: argparse.Namespace, parser: argparse.ArgumentParser, ignore: Collection[str]
) -> list[str]:
    """Return the options that were given, but for those named in `ignore`."""
    defaults = {key: value for key, value in vars(parser.parse_args([])).items() if key not in ignore}
    given = [key for key, value in defaults.items() if getattr(options, key) != value]
    return [f"--{key.replace('_', '-')}" for key in given]


def variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that --set gives, name to value."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() and not name.isdecimal():
            raise ValueError(f"--set {word}: give VARIABLE=VALUE")
        found[name] = value
    return found


def text_of(file: str, label: str) -> str:
    """Return the text of a launch; messages name it `label`."""
    try:
        return sys.stdin.read() if file == "-" else read_outside(file, limit=_LIMIT).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{label} is not a text file: give a script or a command") from None
