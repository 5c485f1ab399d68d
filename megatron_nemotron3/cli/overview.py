"""What `nemotron3 --help` and `nemotron3 --version` print. Neither imports a command."""

from __future__ import annotations

import platform
import shutil
import textwrap

import megatron_nemotron3
from megatron_nemotron3.cli.table import COMMANDS, GROUPS

TITLE = "NVIDIA Nemotron 3 on stock Megatron-LM."
#: Distributions that decide what this package can do, beside its own version.
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "transformers")
_END = """\
nemotron3 COMMAND -h                    all options of a command
nemotron3 --version                     versions, also of torch and Megatron
nemotron3 --print-completion bash|zsh   for eval: Tab completes words and paths
"""


def overview(width: int | None = None) -> str:
    """Return the help: every command with its purpose and an example, by group.

    Args:
        width: columns; None: those of the terminal.
    """
    columns = width or shutil.get_terminal_size().columns
    name = max(map(len, COMMANDS)) + 2
    purpose = max(len(command.purpose) for command in COMMANDS.values()) + 2
    one_line = 2 + name + purpose + max(len(command.example) for command in COMMANDS.values()) <= columns
    lines = ["usage: nemotron3 COMMAND ...", "", TITLE]
    for group, commands in GROUPS.items():
        lines += ["", group]
        for command in commands:
            if one_line:
                lines.append(f"  {command.name:<{name}}{command.purpose:<{purpose}}{command.example}")
                continue
            text = f"{command.name:<{name}}{command.purpose}"
            indent = " " * (2 + name)
            lines += textwrap.wrap(
                text, max(columns, 60), initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False
            )
            lines.append(f"{indent}$ {command.example}")
    return "\n".join([*lines, "", _END])


def versions() -> str:
    """Return the versions of this package, of Python and of the packages that it builds on, as installed."""
    from importlib import metadata  # a quarter of the time of `nemotron3 --help`

    found = {"nemotron3": megatron_nemotron3.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    width = max(map(len, found)) + 2
    return "".join(f"{name:<{width}}{version}\n" for name, version in found.items())
