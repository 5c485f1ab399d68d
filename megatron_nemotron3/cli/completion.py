"""Completion of commands, options, choices, models and paths in bash and zsh, by argcomplete.

    eval "$(nemotron3 --print-completion bash)"      in ~/.bashrc; zsh in ~/.zshrc, after compinit

The shell then runs `nemotron3` with `VARIABLE` set at each Tab, and reads the completions from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

#: Set by the shell function when it asks for completions.
VARIABLE = "_ARGCOMPLETE"
SHELLS = ("bash", "zsh")


def script(shell: str) -> str:
    """Return what a shell evaluates to complete `nemotron3`.

    Raises:
        ValueError: argcomplete is not installed.
    """
    try:
        import argcomplete
    except ModuleNotFoundError:
        raise ValueError(
            "--print-completion: package argcomplete is not installed: "
            "pip install 'megatron-nemotron3[completion]'"
        ) from None
    return str(argcomplete.shellcode(["nemotron3"], shell=shell))


def used_command(line: str) -> str:
    """Return the command in the line that is being completed, or ""."""
    return " ".join(line.split()[1:2])


def answer(parser: argparse.ArgumentParser) -> None:
    """Write the completions that the shell asks for, and end the process."""
    import argcomplete

    for action in _actions(parser):
        if (completer := _completer(action)) is not None:
            action.completer = completer  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False, validator=_begins)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def _completer(action: argparse.Action) -> Callable[..., Any] | None:
    """Return what completes the value of an option; None: its choices, or paths."""
    if action.choices is not None or action.nargs == 0:
        return None
    if action.metavar == "NAME" or "--model" in action.option_strings:
        return _model_names
    if action.type in (int, float) or action.metavar in ("TEXT", "LAYOUT", "N", "N,N,…", "VARIABLE=VALUE"):
        return _nothing
    return None


def _model_names(prefix: str, **_: Any) -> list[str]:
    """Models of the catalog, or files of one's own."""
    from megatron_nemotron3.models.catalog import names

    found = [name for name in names() if name.startswith(prefix.lower())]
    if found:
        return found
    from argcomplete.completers import FilesCompleter

    return list(FilesCompleter(["json", "py"])(prefix))


def _begins(completion: str, prefix: str) -> bool:
    """Whether a word completes a prefix; choices are read in any case."""
    return completion.lower().startswith(prefix.lower())


def _nothing(**_: Any) -> list[str]:
    return []
