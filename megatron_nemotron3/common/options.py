"""Command lines: fuzzy matching of user input, the parser, and dataclasses of options.

@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    source: Path = argument("what to copy", "DIR")
    file_size: int = option("largest size of a file (5)", "GB", default=5, least=1)
    dry_run: bool = flag("print what would be copied")

add_command(parser, CopyOptions, run_copy)     # run_copy(options: CopyOptions) -> exit status
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from itertools import takewhile
from typing import Any, Literal, NoReturn, TypeVar

from megatron_nemotron3.common.processes import exit_at_interrupt

#: Short names of types, accepted where the long ones are choices.
SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: With more options than this, the usage names only the required ones.
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
    """Return "; did you mean 'X'?" for a message about an unknown word, or ""."""
    for near in nearest(word, known):
        return f"; did you mean {(known[near] if isinstance(known, Mapping) else near)!r}?"
    return ""


def _folded(word: str) -> str:
    return word.lower().replace("_", "-")


class OptionParser(argparse.ArgumentParser):
    """A parser that answers bad input with one line, which says what is wrong and what to give."""

    #: Printed below the help; "" for none.
    example = ""

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
        return " ".join([*parts, *["[-- OPTION OF MEGATRON ...]"] * ("extra" in self._defaults)])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # Unknown arguments are an error here, where it is known which command they are for.
        arguments = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else some of the options are a command's
            self._refuse_unknown(arguments)
        found, rest = super().parse_known_args(arguments, namespace)
        if rest:
            self._refuse_unknown(rest)
            self.error(f"unexpected argument {rest[0]}")
        return found, rest

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Report an unknown option before what else is missing because of it."""
        for argument in arguments:
            name = argument.partition("=")[0]
            if not name.startswith("--") or " " in name or name == "--":
                continue
            known = [option for option in self._option_string_actions if option.startswith("--")]
            if not any(option.startswith(name) for option in known):
                self.error(f"unknown option {name}{hint(name, known)}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return a value; choices are accepted in any case, and with _ for -."""
        choices = None if isinstance(action, argparse._SubParsersAction) else action.choices
        if choices is not None and arg_string not in choices:
            spellings = _folded(arg_string), SYNONYMS.get(_folded(arg_string))
            for choice in choices:
                if isinstance(choice, str) and _folded(choice) in spellings:
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


#: The default of a required option or argument.
NEEDED = MISSING
#: Key of a field's metadata.
_DETAILS = "option"
#: Details that `add_argument` takes as they are.
_PASSED = ("help", "metavar", "choices", "nargs", "const")

C = TypeVar("C")


def option(help: str, metavar: str | None = None, *, default: Any = None, **details: Any) -> Any:
    """A field of a dataclass that is an option; its type is that of the annotation.

    Types are str, int, float, Path, Literal (its values are the choices), a list of one of them, and each of
    them or None.
    """
    return field(default=default, metadata={_DETAILS: {"help": help, "metavar": metavar, **details}})


def argument(help: str, metavar: str, *, default: Any = NEEDED, **details: Any) -> Any:
    """A field that is a positional argument, optional if it has a default."""
    return option(help, metavar, default=default, positional=True, **details)


def flag(help: str, **details: Any) -> Any:
    """A field that is True if the option is given."""
    return option(help, default=False, **details)


def repeated(help: str, metavar: str, **details: Any) -> Any:
    """A field that lists the values of an option that may occur several times."""
    return field(default_factory=list, metadata={_DETAILS: {"help": help, "metavar": metavar, **details}})


def json_flag(**details: Any) -> Any:
    """--json, for `output.result` and `output.print_json`."""
    return flag("print one JSON document instead of text", **details)


def workers_option(**details: Any) -> Any:
    """--workers, the number of processes or threads that read and write files."""
    what = "processes or threads (default: one for each core, 8 at most)"
    return option(what, "N", default=min(8, os.cpu_count() or 1), least=1, **details)


def device_option(**details: Any) -> Any:
    """--device, which `resolve_device` reads."""
    choices = ["auto", "cpu", "cuda"]
    what = "where it computes (default auto: a GPU, if there is one)"
    return option(what, default="auto", choices=choices, **details)


def text_option(use: str, **details: Any) -> Any:
    """--text, which excludes --data-path; `use`: its purpose, or what is read without it."""
    return option(f"text file, .jsonl or folder ({use})", "PATH", one_of="text", **details)


def data_path_option(data: str = "here one, without a split", **details: Any) -> Any:
    """--data-path, which excludes --text; `data`: how a data set is read."""
    return option(f"Megatron data sets ({data})", "PREFIX", one_of="text", **details)


def tokenizer_option(default: str, **details: Any) -> Any:
    """--tokenizer, the folder of a Hugging Face tokenizer."""
    return option(f"folder of a Hugging Face tokenizer (default: {default})", "DIR", **details)


def add_options(parser: argparse._ActionsContainer, cls: type) -> None:
    """Add an option for each field of a dataclass, in their order.

    A field whose type is such a dataclass stands for the options of that one. A plain field is no option: its
    value comes from the namespace, if it is there.
    """
    hints = typing.get_type_hints(cls)
    for one in fields(cls):
        if is_dataclass(hints[one.name]):
            add_options(parser, hints[one.name])
        if _DETAILS not in one.metadata:
            continue
        _add(parser, one, hints[one.name])


def add_option(parser: argparse._ActionsContainer, name: str, one: Any, kind: type = str) -> None:
    """Add one option, as `option` returns it, to a parser without a dataclass."""
    one.name = name
    _add(parser, one, kind)


def from_arguments(cls: type[C], parsed: argparse.Namespace) -> C:
    """Return a dataclass with the values that a parser with `add_options` found."""
    hints, values = typing.get_type_hints(cls), {}
    for one in fields(cls):  # type: ignore[arg-type]
        if is_dataclass(hints[one.name]):
            values[one.name] = from_arguments(hints[one.name], parsed)
        elif one.name in parsed or _DETAILS in one.metadata:
            values[one.name] = getattr(parsed, one.name)
            _check_bounds(one, values[one.name])
    return cls(**values)


def add_command(parser: argparse.ArgumentParser, cls: type[C], run: Callable[[C], int]) -> None:
    """Make a dataclass the options of a command, and `run` what is called with them."""
    add_options(parser, cls)
    parser.set_defaults(run=lambda parsed: run(from_arguments(cls, parsed)))


def _add(parser: argparse._ActionsContainer, one: Field[Any], kind: Any) -> None:
    details = one.metadata[_DETAILS]
    settings = _settings(one, kind)
    if not details.get("positional"):
        settings["dest"] = one.name
    group = _group(parser, details.get("group"))
    if "one_of" in details:
        group = _exclusive_group(group, details["one_of"])
    group.add_argument(*_names(one), **settings)
    for spelling in details.get("hidden", ()):
        hidden = {**settings, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS, "metavar": None}
        hidden.pop("required", None)
        parser.add_argument(spelling, **hidden)


def _names(one: Field[Any]) -> list[str]:
    details = one.metadata[_DETAILS]
    if details.get("positional"):
        return [one.name]
    return [details.get("spelling") or "--" + one.name.replace("_", "-")]


def _settings(one: Field[Any], hint: Any) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for a field with this type."""
    details = one.metadata[_DETAILS]
    settings = {name: details[name] for name in _PASSED if details.get(name) is not None}
    kind = _without_none(hint)
    if kind is bool:
        return {"action": "store_true", **settings}
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
        if "nargs" not in settings:
            settings["action"] = "append"
    if typing.get_origin(kind) is Literal:
        settings["choices"] = typing.get_args(kind)
    elif "parse" in details:
        settings["type"] = details["parse"]
    elif kind is not str:
        settings["type"] = kind
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    if default is not MISSING:
        settings["default"] = default
        if details.get("positional"):
            settings["nargs"] = "?"
    elif not details.get("positional"):
        settings["required"] = True
    return settings


def _without_none(hint: Any) -> Any:
    """X of `X | None`; another type as it is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return rest[0] if len(rest) == 1 else hint
    return hint


def _group(parser: argparse._ActionsContainer, title: str | None) -> argparse._ActionsContainer:
    """The group of this title, new if there is none; the parser itself for None."""
    if title is None:
        return parser
    known = {group.title: group for group in parser._action_groups}
    return known[title] if title in known else parser.add_argument_group(title)


def _exclusive_group(group: argparse._ActionsContainer, name: str) -> argparse._ActionsContainer:
    for known in group._mutually_exclusive_groups:
        if known.title == name:
            return known
    new = group.add_mutually_exclusive_group()
    new.title = name
    return new


def _check_bounds(one: Field[Any], value: Any) -> None:
    details = one.metadata.get(_DETAILS, {})
    least, most = details.get("least"), details.get("most")
    if value is None or least is None or (least <= value and (most is None or value <= most)):
        return
    name = _names(one)[0]
    raise ValueError(f"{name} {value}: give {least} {'or more' if most is None else f'to {most}'}")


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
    print(f"megatron_nemotron3.run: {message}", file=sys.stderr)
    raise SystemExit(2)


def resolve_device(device: str) -> str:
    """auto -> cuda where torch sees a GPU, else cpu."""
    try:
        with exit_at_interrupt("megatron_nemotron3"):
            import torch
    except ModuleNotFoundError:
        fail("package torch is not installed: pip install 'megatron-nemotron3[train]'")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        fail("--device cuda, but torch sees no GPU: use --device cpu")
    return ("cuda" if available else "cpu") if device == "auto" else device
