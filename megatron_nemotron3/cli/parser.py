"""The parsers of the command line: one line about bad input, the nearest word, choices in any case."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from megatron_nemotron3.cli.table import COMMANDS, DIRECTIONS

#: Short names of types, read where the long ones are choices.
SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: With more options than this, the usage names only those that are needed.
MANY = 10


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the word that `word` most likely stands for, or ""."""
    words = list(known)
    folded = {_folded(other): other for other in reversed(words)}
    begin = [other for other in folded if len(word) > 1 and other.startswith(_folded(word))]
    near = begin or difflib.get_close_matches(_folded(word), folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[near[0]]}?" if near else ""


def _folded(word: str) -> str:
    return word.lower().replace("_", "-")


class Parser(argparse.ArgumentParser):
    """A parser that answers bad input with one line, which says what is wrong and what to give."""

    @property
    def example(self) -> str:
        """Printed below the help; "" for none."""
        name = self.prog.partition(" ")[2]
        return DIRECTIONS.get(name) or (COMMANDS[name].example if name in COMMANDS else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")
        raise AssertionError  # `exit` does not return

    def format_help(self) -> str:
        if len([action for action in self._actions if action.option_strings]) > MANY:
            self.usage = self._short_usage()
        text = super().format_help()
        return f"{text}\nexample:\n  {self.example}\n" if self.example else text

    def _short_usage(self) -> str:
        """Return the usage with the options that are needed; the help below it has the others in groups."""
        words = [self.prog.replace("%", "%%")]
        for action in self._actions:
            if action.required and action.option_strings:
                words.append(f"{action.option_strings[0]} {action.metavar or action.dest.upper()}")
        words.append("[OPTION ...]")
        for action in self._actions:
            if not action.option_strings:
                words.append(f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar))
        return " ".join([*words, *["[-- OPTION OF MEGATRON ...]"] * ("extra" in self._defaults)])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; an option or a word that this parser does not know is an error here, where it is known which
        command it was meant for."""
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else some of the options are a command's
            self._refuse_unknown(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self._refuse_unknown(rest)
            self.error(f"unexpected argument {rest[0]}")
        return found, rest

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Report an unknown option before what else is missing because of it."""
        for word in words:
            name = word.partition("=")[0]
            if not name.startswith("--") or " " in name or name == "--":
                continue
            known = [option for option in self._option_string_actions if option.startswith("--")]
            if not any(option.startswith(name) for option in known):
                self.error(f"unknown option {name}{nearest(name, known)}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return a value; choices are accepted in any case, and with _ for -."""
        choices = None if isinstance(action, argparse._SubParsersAction) else action.choices
        if choices is not None and arg_string not in choices:
            for choice in choices:
                if isinstance(choice, str) and _folded(choice) in (
                    _folded(arg_string),
                    SYNONYMS.get(_folded(arg_string)),
                ):
                    return choice
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            self.error(
                f"unknown command {value}{nearest(value, choices)} ({self.prog} --help lists them all)"
            )
        raise argparse.ArgumentError(
            action,
            f"invalid choice: {value!r} (choose from {', '.join(choices)}){nearest(str(value), choices)}",
        )


class Commands:
    """What `register` of a module gets: adds a parser with the texts of the table."""

    def __init__(self, action: Any) -> None:
        self._action = action

    def add_parser(self, name: str, **settings: Any) -> argparse.ArgumentParser:
        """Return the new parser of a command of the table; `settings` as argparse takes them."""
        command = COMMANDS[name]
        purpose = command.purpose[0].upper() + command.purpose[1:] + "."
        settings = {"description": purpose, **settings, "help": command.purpose}
        parser: argparse.ArgumentParser = self._action.add_parser(name, **settings)
        return parser

    def add_name(self, name: str) -> None:
        """Add the name of a command that is not going to be used."""
        self._action.add_parser(name, help=COMMANDS[name].purpose, add_help=False)
