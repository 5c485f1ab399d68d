"""A dataclass becomes the options of a command.

@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    source: Path = argument("what to copy", "DIR")
    file_size: int = option("largest size of a file (5)", "GB", default=5, least=1)
    dry_run: bool = flag("print what would be copied")

add_command(parser, CopyOptions, run_copy)     # run_copy(options: CopyOptions) -> exit status
"""

from __future__ import annotations

import argparse
import os
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

#: The default of a required option or argument.
NEEDED = MISSING
#: Title of the options of what a run measures.
LOG = "measurements and log"
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
    what = "number of processes or threads (default: one per core, at most 8)"
    return option(what, "N", default=min(8, os.cpu_count() or 1), least=1, **details)


def device_option(**details: Any) -> Any:
    """--device, which `resolve_device` reads."""
    choices = ["auto", "cpu", "cuda"]
    what = "device to run on (default auto: a GPU, if available)"
    return option(what, default="auto", choices=choices, **details)


def text_option(use: str, **details: Any) -> Any:
    """--text, which excludes --data-path; `use`: its purpose, or what is read without it."""
    return option(f"text file, .jsonl or folder ({use})", "PATH", one_of="text", **details)


def data_path_option(data: str = "only one, without a split", **details: Any) -> Any:
    """--data-path, which excludes --text; `data`: how a data set is read."""
    return option(f"Megatron data set ({data})", "PREFIX", one_of="text", **details)


def tokenizer_option(default: str, **details: Any) -> Any:
    """--tokenizer, the folder of a Hugging Face tokenizer."""
    return option(f"Hugging Face tokenizer folder (default: {default})", "DIR", **details)


def config_option() -> Any:
    """--config, which the parser reads itself (`config_file`)."""
    return option("YAML file with options of this command; the command line takes precedence", "FILE")


@dataclass(frozen=True, kw_only=True)
class TrackingOptions:
    """Where the numbers of a run go besides its log."""

    wandb: str | None = option("Weights & Biases project to log to", "PROJECT", group=LOG)
    tensorboard: str | None = option(
        "folder of TensorBoard events; requires TensorBoard (default: tensorboard/ in the run, if installed)",
        "DIR",
        nargs="?",
        const="",
        group=LOG,
    )


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
        elif not details.get("positional") and one.default in (None, MISSING):
            settings["action"] = "extend"  # the values of all its occurrences
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
