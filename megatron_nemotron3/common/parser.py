"""The parser of command lines, and what reads arguments without one.

Options from dataclasses are in `options`: `nemotron3 --help` starts without them.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NoReturn

from megatron_nemotron3.common.files import printable
from megatron_nemotron3.common.processes import exit_at_interrupt

#: Short names of types, accepted where the long ones are choices.
SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Options of other tools and of Megatron: what they are here, if the command has it, with a note in brackets.
OPTIONS = {
    "--batch-size": "--global-batch-size",
    "--checkpoint": "CHECKPOINT (an argument, without an option)",
    "--context-parallel-size": "--cp",
    "--expert-model-parallel-size": "--ep",
    "--learning-rate": "--lr",
    "--max-length": "--seq-length",
    "--max-seq-length": "--seq-length",
    "--max-steps": "--steps",
    "--max-tokens": "--max-new-tokens",
    "--num-gpus": "--gpus",
    "--output-dir": "--output",
    "--pipeline-model-parallel-size": "--pp",
    "--resume": "--output (what its folder has goes on)",
    "--resume-from-checkpoint": "--output (what its folder has goes on)",
    "--save": "--output",
    "--sequence-parallel": "--tp (of 2 or more turns it on)",
    "--tensor-model-parallel-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--train-iters": "--steps",
    "--world-size": "--gpus",
}
#: Module -> the package that has it, where the names differ.
PACKAGES = {"google": "protobuf", "megatron": "megatron-core", "yaml": "pyyaml"}
#: Characters of a word that are compared with others: twice the longest option of Megatron.
LONGEST = 128
#: With more options than this, the usage names only the required ones.
MANY = 10


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return at most `count` of the known words that `word` may stand for, the likeliest first.

    A word that begins with it comes before those that only look alike, and the shorter before the longer.
    """
    folded = {_folded(other): other for other in reversed(list(known))}
    word = _folded(word)[:LONGEST]
    if word in folded:
        return [folded[word]]
    begin = sorted((other for other in folded if len(word) > 1 and other.startswith(word)), key=len)
    close = difflib.get_close_matches(word, folded, n=count)
    return [folded[other] for other in dict.fromkeys([*begin, *close])][:count]


def hint(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" for a message about an unknown word, or "".

    A mapping has what a word stands for, with a note in brackets if needed.
    """
    for near in nearest(word, known):
        name, bracket, note = (known[near] if isinstance(known, Mapping) else near).partition(" (")
        return f"; did you mean {name!r}{bracket}{note}?"
    return ""


def _folded(word: str) -> str:
    return word.lower().replace("_", "-")


class OptionParser(argparse.ArgumentParser):
    """A parser that answers bad input with one line, which says what is wrong and what to give."""

    #: Printed below the help; "" for none.
    example = ""
    #: Words for commands, and for earlier ones: what `hint` says.
    command_words: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A script with an abbreviation would change its meaning with the next option.
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")
        raise AssertionError  # `exit` does not return

    def format_help(self) -> str:
        if len([action for action in self._actions if action.option_strings]) > MANY:
            self.usage = self._short_usage()
        text = super().format_help()
        return f"{text}\nexample:\n  {self.example}\n" if self.example else text

    def _short_usage(self) -> str:
        """The usage with the required options; the help below it has the others in groups."""
        parts = [self.prog.replace("%", "%%")]
        for action in self._actions:
            if action.required and action.option_strings:
                parts.append(f"{action.option_strings[0]} {action.metavar or action.dest.upper()}")
        parts.append("[OPTION ...]")
        for action in self._actions:
            if not action.option_strings:
                parts.append(f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar))
        return " ".join([*parts, *["[-- MEGATRON ARGUMENT ...]"] * ("extra" in self._defaults)])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # Unknown arguments are an error here, where it is known which command they are for.
        arguments = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else some of the options are a command's
            self._refuse_unknown(arguments)
        if "--config" in self._option_string_actions:
            found, rest = self._with_config(arguments, namespace)
        else:
            found, rest = super().parse_known_args(arguments, namespace)
        if rest:
            self._refuse_unknown(rest)
            self.error(f"unexpected argument {rest[0]}")
        return found, rest

    def _with_config(self, arguments: list[str], namespace: Any) -> tuple[Any, list[str]]:
        """Parse with the options of --config as defaults; keep what was given for `config_text`."""
        from megatron_nemotron3.common import config_file

        defaults = None
        try:
            if (file := config_file.file_of(arguments)) is not None:
                defaults = config_file.Defaults(self, file, hint)
            found, rest = super().parse_known_args(arguments, namespace)
        except (ValueError, OSError) as problem:
            self.error(printable(str(problem)))
        finally:
            if defaults is not None:
                defaults.restore()
        for name, value in vars(found).items():
            if isinstance(value, config_file.FromFile):
                setattr(found, name, list(value))
        found.given = config_file.given_text(self, found)
        if defaults is not None and defaults.extra:
            found.extra = defaults.extra
        return found, rest

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Report an unknown option before what else is missing because of it."""
        for argument in arguments:
            name = argument.partition("=")[0]
            if not name.startswith("--") or " " in name or name == "--":
                continue
            known = {option: option for option in self._option_string_actions if option.startswith("--")}
            if name not in known:
                here = {*known, *(action.metavar for action in self._actions)}
                for word, meant in OPTIONS.items():
                    if meant.partition(" ")[0] in here:
                        known.setdefault(word, meant)
                elsewhere = "; options of Megatron follow a separate --" if "extra" in self._defaults else ""
                self.error(f"unknown option {name}{hint(name, known) or elsewhere}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return a value; choices are accepted in any case, and with _ for -."""
        choices = None if isinstance(action, argparse._SubParsersAction) else action.choices
        if choices is not None and arg_string not in choices:
            spellings = _folded(arg_string), SYNONYMS.get(_folded(arg_string))
            for choice in choices:
                if isinstance(choice, str) and _folded(choice) in spellings:
                    return choice
        return super()._get_value(action, arg_string)

    def commands_below(self, names: Iterable[str]) -> dict[str, str]:
        """The commands below this one, and words for them, for `hint`."""
        known = {name: name for name in names}
        for word, meant in self.command_words.items():
            if f"nemotron3 {meant}".startswith(f"{self.prog} "):
                known.setdefault(word, meant)
        return known

    def refuse_command(self, word: str, near: str) -> NoReturn:
        self.error(f"unknown command {word}{near} ({self.prog} --help lists them all)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            self.refuse_command(value, hint(value, self.commands_below(choices)))
        # A word that begins several choices (fp8) stands for none of them.
        near = "" if sum(one.startswith(str(value)) for one in choices) > 1 else hint(str(value), choices)
        said = f"invalid choice: {value!r} (choose from {', '.join(choices)}){near}"
        raise argparse.ArgumentError(action, said)


def option_values(argv: Sequence[str], name: str) -> tuple[str, ...] | None:
    """Return the values of an option in a Megatron command line; None without the option.

    As for Megatron's own parser, the last of several occurrences counts.
    """
    found = None
    for at, argument in enumerate(argv):
        if argument == name:
            found = tuple(takewhile(lambda following: not following.startswith("--"), argv[at + 1 :]))
        elif argument.startswith(f"{name}="):
            found = (argument.partition("=")[2],)
    return found


def option_value(argv: Sequence[str], name: str) -> str | None:
    """Return the first of `option_values`, or None."""
    values = option_values(argv, name)
    return values[0] if values else None


def fail(message: str) -> NoReturn:
    """Print one line and leave with exit code 2."""
    print(f"megatron_nemotron3.run: {printable(message)}", file=sys.stderr)
    raise SystemExit(2)


def first_missing(*modules: str) -> str | None:
    """Return the first of the modules that cannot be imported, or None."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # the package around it
            found = None
        if found is None:
            return module
    return None


def not_installed(module: str, extra: str = "train") -> str:
    """Return a line that says which package has a module, and what to install for this Python."""
    top = module.partition(".")[0]
    package = PACKAGES.get(top, top)
    cure = f"pip install 'megatron-nemotron3[{extra}]'"
    if extra == "train" and sys.version_info[:2] < (3, 12):
        # pip finds no megatron-core for this Python, and so no such extra.
        this = ".".join(map(str, sys.version_info[:2]))
        needs = (
            f"megatron-core needs Python 3.12, and this is {this}: make an environment with python3.12, and "
        )
        cure = f"{needs}there {cure}" if top in ("megatron", "torch") else f"pip install {package}"
    return f"package {package} is not installed: {cure}"


def resolve_device(device: str, *needed: str) -> str:
    """auto -> cuda where torch sees a GPU, else cpu; `needed`: modules without which nothing begins."""
    if (missing := first_missing("torch", *needed)) is not None:
        fail(not_installed(missing))
    with exit_at_interrupt("megatron_nemotron3"):
        import torch
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        fail("--device cuda, but torch sees no GPU: use --device cpu")
    return ("cuda" if available else "cpu") if device == "auto" else device
