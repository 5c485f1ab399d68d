"""Options of a command that reads the script of an existing launch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection

from megatron_nemotron3.common.files import read_outside
from megatron_nemotron3.launch.script import LaunchSource

#: Longest script that is read, in bytes.
_LIMIT = 16 << 20


def add_set(command: argparse._ActionsContainer, script: str) -> None:
    """Add --set and --trust-script, for a command that reads a script; `source_of` reads them."""
    command.add_argument(
        "--set",
        metavar="VARIABLE=VALUE",
        action="append",
        default=[],
        help=f"value of a variable of the script ({script}); 1: its first argument; may be repeated",
    )
    command.add_argument(
        "--trust-script",
        action="store_true",
        help="run the script's shell code also where this system cannot confine it (no libseccomp)",
    )


def given_options(
    options: argparse.Namespace, parser: argparse.ArgumentParser, ignore: Collection[str]
) -> list[str]:
    """Return the options that were given, but for those named in `ignore`."""
    defaults = {key: value for key, value in vars(parser.parse_args([])).items() if key not in ignore}
    given = [key for key, value in defaults.items() if getattr(options, key) != value]
    return [f"--{key.replace('_', '-')}" for key in given]


def source_of(options: argparse.Namespace, file: str, label: str) -> LaunchSource:
    """Return the text of a launch with --set and --trust-script; messages name it `label`."""
    found = {}
    for word in options.set:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() and not name.isdecimal():
            raise ValueError(f"--set {word}: give VARIABLE=VALUE")
        found[name] = value
    try:
        text = sys.stdin.read() if file == "-" else read_outside(file, limit=_LIMIT).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{label} is not a text file: give a script or a command") from None
    path = {} if file == "-" else {"path": file}
    return LaunchSource(text, found, trusted=options.trust_script, **path)
