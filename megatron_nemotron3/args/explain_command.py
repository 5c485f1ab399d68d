"""`nemotron3 explain`: its options, and what it prints. Standard library only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_nemotron3.args.explain import explain, explain_command, with_megatron_defaults
from megatron_nemotron3.args.explain_text import render
from megatron_nemotron3.models import Nemotron3Config

#: Options that go with --argv.
_BESIDE_ARGV = ("argv", "all", "json", "tiny", "schedule", "name")


def add_explain(command: argparse.ArgumentParser) -> None:
    """Its options, beside those of `nemotron3 flags`."""
    command.add_argument("--argv", metavar="FILE", help="explain this script or command instead; -: stdin")
    command.add_argument("--all", action="store_true", help="and the defaults of the installed Megatron")
    command.add_argument("--json", action="store_true", help="machine-readable")


def run(
    options: argparse.Namespace,
    extra: Sequence[str],
    config: Nemotron3Config,
    plain: Mapping[str, Any],
    launch: Callable[[], dict[str, Any]],
) -> str:
    """The text for stdout.

    Args:
        extra: Megatron's words behind a lone `--`.
        plain: what the options are where none is given.
        launch: the arguments of `flags` that the options mean; not called with --argv.

    Raises:
        RuleError, ValueError: as `explain`; --argv beside options that would say the same.
        OSError: the file of --argv cannot be read.
    """
    name = "published" if options.schedule == "none" else options.schedule
    if options.argv is None:
        found = explain(**launch(), name=name)
    else:
        given = {key: value for key, value in vars(options).items() if key not in _BESIDE_ARGV}
        told = [key for key, value in given.items() if value != plain[key]]
        if told or extra:
            words = [*(f"--{key.replace('_', '-')}" for key in told), *extra]
            raise ValueError(f"--argv explains a launch as it is: drop {' '.join(words)}")
        found = explain_command(config, _text(options.argv), name)
    if options.all:
        found = with_megatron_defaults(found)
    return json.dumps(found.describe(), indent=2) if options.json else render(found)


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--argv {file} is no text: give a script or a command") from None
