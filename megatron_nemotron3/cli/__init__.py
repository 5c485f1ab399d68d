"""The `nemotron3` command.

Only the module of the command that is used is imported. Invalid input ends with exit code 2 and one line on
stderr.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence

import megatron_nemotron3
from megatron_nemotron3.cli.table import COMPLETION, CommandParser, Commands, command_of

#: Distributions that decide what this package can do, next to its own version.
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "transformers")


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a command line that begins with these words; other commands are only names."""
    top = CommandParser(
        prog="nemotron3",
        usage="nemotron3 COMMAND ...",
        description="NVIDIA Nemotron 3 on stock Megatron-LM.",
        epilog="nemotron3 COMMAND -h prints all options of a command, and the commands below it.",
    )
    top.add_argument("--version", action="store_true", help="print versions, also of torch and Megatron")
    action = top.add_subparsers(
        title="commands", prog=top.prog, dest="command", metavar="COMMAND", parser_class=CommandParser
    )
    commands = Commands(action)
    if name := command_of(words):
        commands.add(name)
    commands.add_names()
    return top


def versions() -> str:
    """Return the versions of this package, of Python and of `PACKAGES`, as installed."""
    # `nemotron3 --help` is parsed by this module, too, and needs neither.
    from importlib import metadata

    from megatron_nemotron3.common.output import table

    found = {"nemotron3": megatron_nemotron3.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return "\n".join([*table(list(found.items())), ""])


def _drop_output() -> None:
    """Discard what is buffered for stdout, which cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # `nemotron3 flags … | head`
        _drop_output()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    if COMPLETION in os.environ:  # for completion by a shell; runs nothing
        import argcomplete

        words = os.environ.get("COMP_LINE", "").split()[1:]
        argcomplete.autocomplete(parser(words), always_complete_options=False)
    if argv[:1] == ["run"]:  # every argument after it belongs to the launcher and the script
        from megatron_nemotron3 import run

        run.main(argv[1:], lambda own: parser(["run"]).parse_args(["run", *own]))
        return 0
    cut = argv.index("--") if "--" in argv else len(argv)
    top, name = parser(argv), command_of(argv)
    options = top.parse_args(argv[:cut])
    extra = argv[cut + 1 :]
    if options.version or options.command is None:
        print(versions() if options.version else top.format_help(), end="", flush=True)
        return 0
    from megatron_nemotron3.common.files import printable
    from megatron_nemotron3.common.limits import ChildError
    from megatron_nemotron3.common.parser import not_installed

    try:
        if extra and not hasattr(options, "extra"):
            raise ValueError(f"no arguments are allowed after --: drop {' '.join(extra)}")
        # Those of --config come first, so the last of two counts as everywhere.
        options.extra = [*getattr(options, "extra", ()), *extra]
        options.command_line = shlex.join(["nemotron3", *argv])
        options.main = main  # for a command that consists of commands
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ChildError) as problem:
        try:
            sys.stdout.flush()
        except OSError:  # a full disk; Python would flush again when it ends, and print a traceback
            _drop_output()
        text = str(problem)
        if isinstance(problem, OSError) and problem.filename:
            text = f"{problem.filename}: {problem.strerror}"
        text = printable(text, but="\n")
        print(f"nemotron3 {name}: {text}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        if missing.name is None:
            raise
        line = not_installed(missing.name, "convert" if name.startswith("convert") else "train")
        print(f"nemotron3 {name}: {line}", file=sys.stderr)
        return 2
