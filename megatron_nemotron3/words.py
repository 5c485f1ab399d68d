"""Words that a person gave: the known ones that they may stand for, and the parser of command lines.

Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

#: Short names of types, read where the long ones are choices.
SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: With more options than this, the usage names only those that are needed.
MANY = 10


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return at most `count` of the known words that `word` may stand for, the likeliest first.

    A word that begins with it comes before those that only look alike, and the shorter before the longer.
    """
    folded = {_folded(other): other for other in reversed(list(known))}
    word = _folded(word)
    if word in folded:
        return [folded[word]]
    begin = sorted((other for other in folded if len(word) > 1 and other.startswith(word)), key=len)
    close = difflib.get_close_matches(word, folded, n=count)
    return [folded[other] for other in dict.fromkeys([*begin, *close])][:count]


def hint(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" for a message about an unknown word, or "".

    Args:
        known: words, or a mapping from words to what they are to be replaced by in the message.
    """
    for near in nearest(word, known):
        return f"; did you mean {(known[near] if isinstance(known, Mapping) else near)!r}?"
    return ""


def _folded(word: str) -> str:
    return word.lower().replace("_", "-")


def add_device(parser: argparse._ActionsContainer) -> None:
    """Add --device, which `run.resolve_device` reads."""
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where it computes (default auto: a GPU, if there is one)",
    )


def add_text(
    parser: argparse._ActionsContainer, use: str, data: str = "here one, without a split"
) -> argparse._MutuallyExclusiveGroup:
    """Add --text or --data-path; return their group, of which one is given.

    Args:
        use: what the text is for, or what is read without it.
        data: how a data set is read.
    """
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--text", metavar="PATH", help=f"text file, .jsonl or folder ({use})")
    group.add_argument("--data-path", metavar="PREFIX", help=f"Megatron data sets ({data})")
    return group


def add_tokenizer(parser: argparse._ActionsContainer, default: str) -> None:
    """Add --tokenizer, the folder of a Hugging Face tokenizer."""
    what = f"folder of a Hugging Face tokenizer (default: {default})"
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help=what)


def add_workers(parser: argparse._ActionsContainer) -> None:
    """Add --workers, the processes or threads that read and write files."""
    what = "processes or threads (default: one for each core, 8 at most)"
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help=what)


class Parser(argparse.ArgumentParser):
    """A parser that answers bad input with one line, which says what is wrong and what to give."""

    @property
    def example(self) -> str:
        """Printed below the help; "" for none."""
        return ""

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
                self.error(f"unknown option {name}{hint(name, known)}")

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
            self.error(f"unknown command {value}{hint(value, choices)} ({self.prog} --help lists them all)")
        raise argparse.ArgumentError(
            action,
            f"invalid choice: {value!r} (choose from {', '.join(choices)}){hint(str(value), choices)}",
        )
