"""--config FILE.yaml: the options of a command in a file, and the file that repeats a run.

steps: 1000
lr: 5e-5
conversations: [a.jsonl, b.jsonl]
isolate-documents: true
megatron: [--num-workers, 2]          # what would follow `--`

Keys are options without their dashes, or a positional argument as the usage calls it. Of the command line and
the file the command line counts. Values stay text, which the option reads as if it were typed, so 5e-5 is a
number here. Only events of the parser are read: no tag, anchor or alias makes an object of anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_nemotron3.common.files import printable, read_outside

#: Longest file that is read, in bytes.
LIMIT = 64 << 10
#: Key of the arguments for Megatron.
MEGATRON = "megatron"
#: Name of the file next to a run.
FILE = "config.yaml"

#: Options whose risk is only for who types them.
_ON_THE_LINE = ("trust-checkpoint",)
_EMPTY, _YES, _NO = ("", "~", "null"), ("true", "yes", "on"), ("false", "no", "off")


class FileEntry(NamedTuple):
    """A key of the file: its line, and its words; a single plain word may also mean yes, no or nothing."""

    line: int
    words: list[str]
    is_list: bool
    plain: bool


class FromFile(list[Any]):
    """Values of an option that may be repeated: argparse's copy for the first one on the line is empty."""

    def __copy__(self) -> list[Any]:
        return []


def read_config(path: str) -> dict[str, FileEntry]:
    """Read a file. ValueError with its name and line if it is no mapping of options to words and lists."""
    try:
        text = read_outside(path, limit=LIMIT)
    except OSError as problem:
        raise ValueError(f"--config {path}: {problem.strerror}") from None
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError(f"--config {path}: package pyyaml is not installed: pip install pyyaml") from None
    try:
        return _mapping(path, yaml.parse(text.decode("utf-8-sig"), Loader=yaml.SafeLoader))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is not UTF-8 text: give a YAML file") from None
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        what = getattr(problem, "problem", None) or str(problem).split("\n", 1)[0]
        raise ValueError(f"{path}{line}: it is not YAML: {what}") from None


def _mapping(path: str, events: Iterator[Any]) -> dict[str, FileEntry]:
    """Build the mapping from the events of a YAML parser, which end at the first that does not belong."""
    import yaml

    found: dict[str, FileEntry] = {}
    depth, key, documents = 0, None, 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        elif isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError(f"{path}:{line}: anchors and aliases are not read: write the value out")
        elif isinstance(event, yaml.ScalarEvent) and depth:
            if depth == 2 and key is not None:
                found[key].words.append(event.value)
            elif key is None:
                key = _new_key(path, line, event.value, found)
            else:
                found[key], key = FileEntry(line, [event.value], False, event.style is None), None
        elif isinstance(event, yaml.MappingStartEvent) and depth == 0 and documents == 1:
            depth = 1
        elif isinstance(event, yaml.SequenceStartEvent) and depth == 1 and key is not None:
            found[key], depth = FileEntry(line, [], True, False), 2
        elif isinstance(event, yaml.CollectionEndEvent):
            depth, key = depth - 1, None
        elif isinstance(event, yaml.NodeEvent):
            raise ValueError(f"{path}:{line}: give OPTION: VALUE, or OPTION: [VALUE, VALUE]")
    return found


def _new_key(path: str, line: int, text: str, known: Iterable[str]) -> str:
    key = text.removeprefix("--").replace("_", "-").lower()
    if key in known:
        raise ValueError(f"{path}:{line}: {key} is given twice: give it once")
    return key


def keys_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Key in a file -> option or argument of a command that a file may give."""
    found = {}
    for action in parser._actions:
        long = [name[2:] for name in action.option_strings if name.startswith("--")]
        name = long[0] if long else str(action.metavar or action.dest).lower().replace("_", "-")
        if name not in ("help", "config", *_ON_THE_LINE):
            found[name] = action
    return found


def given_text(parser: argparse.ArgumentParser, found: argparse.Namespace) -> dict[str, str]:
    """Key -> value as JSON, which is YAML, for what differs from the defaults of a command."""
    lines = {}
    for key, action in keys_of(parser).items():
        value = getattr(found, action.dest)
        if value != action.default:
            shown = [*map(_plain, value)] if isinstance(value, list) else _plain(value)
            lines[key] = json.dumps(shown, ensure_ascii=False)
    return lines


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else os.fspath(value)


def config_text(folder: Path, given: Mapping[str, str], extra: Iterable[str], command: str) -> str:
    """The options of a run in `folder`, for a file there; comments name the command and variables."""
    words = ["nemotron3", command, "--config", str(folder / FILE)]
    lines = [f"# {printable(shlex.join(words))}", f"# in {printable(str(Path.cwd()))}"]
    lines += [
        f"# with {name}={shlex.quote(value)}"
        for name, value in sorted(os.environ.items())
        if name.startswith("NEMOTRON3_") and value.isprintable()
    ]
    lines += [f"{key}: {value}" for key, value in given.items()]
    if extra := list(extra):
        lines.append(f"{MEGATRON}: {json.dumps(extra, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


class Defaults:
    """The values of a file as the defaults of a parser, until `restore`."""

    def __init__(self, parser: Any, path: str, hint: Callable[[str, list[str]], str]) -> None:
        self.saved: list[tuple[argparse.Action, dict[str, Any]]] = []
        self.extra: list[str] = []
        known = keys_of(parser)
        for key, entry in read_config(path).items():
            where = f"{path}:{entry.line}: "
            if key in _ON_THE_LINE:
                raise ValueError(f"{where}{key} is read from the command line only")
            if key == MEGATRON and "extra" in parser._defaults:
                self.extra = entry.words
            elif key not in known:
                raise ValueError(f"{where}unknown option {key}{hint(key, list(known))}")
            else:
                try:
                    self._set(parser, known[key], entry)
                except (argparse.ArgumentError, ValueError) as problem:
                    text = problem.message if isinstance(problem, argparse.ArgumentError) else problem
                    raise ValueError(f"{where}{key}: {text}") from None

    def _set(self, parser: Any, action: argparse.Action, entry: FileEntry) -> None:
        repeated, word = isinstance(action, argparse._AppendAction), entry.words[0] if entry.words else ""
        if entry.plain and word.lower() in _EMPTY:
            return
        several = repeated or action.nargs in ("+", "*")
        is_switch = action.nargs == "?" and entry.plain and word.lower() in (*_YES, *_NO)
        if action.nargs == 0 or (is_switch and action.option_strings):
            if not entry.plain or word.lower() not in (*_YES, *_NO):
                raise ValueError(f"{' '.join(entry.words)!r}: give true or false")
            value = action.default if word.lower() in _NO else action.const
        elif entry.is_list and not several:
            raise ValueError(f"{entry.words}: give one value")
        elif not entry.words:
            raise ValueError("the list is empty: give a value")
        else:
            values = [parser._get_value(action, one) for one in entry.words]
            for one in values:
                parser._check_value(action, one)
            value = FromFile(values) if repeated else values if several else values[0]
        self.saved.append(
            (action, {name: getattr(action, name) for name in ("default", "required", "nargs")})
        )
        action.default, action.required = value, False
        if not action.option_strings and action.nargs is None:
            action.nargs = "?"

    def restore(self) -> None:
        for action, before in self.saved:
            for name, value in before.items():
                setattr(action, name, value)


def file_of(arguments: list[str]) -> str | None:
    """The value of --config in a command line. ValueError if there are several."""
    only = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    only.add_argument("--config", action="append", default=[])
    try:
        found: list[str] = only.parse_known_args(arguments)[0].config
    except argparse.ArgumentError:  # without a value, which the command's own parser says
        return None
    if len(found) > 1:
        raise ValueError(f"--config is given {len(found)} times ({', '.join(found)}): give one file")
    return found[0] if found else None
