"""Options of the Megatron that Python imports, as its own parser has them.

`options.json` ends at the checkout that it was read from, and a later release or a branch has more. Importing
Megatron takes ten seconds, so its parser is read only for a name that occurs in its sources: by this process
where it has imported Megatron already, else by a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from typing import Any

from megatron_nemotron3.launch import versions

#: name -> what `options.json` says of an option, without the columns that are written by hand.
Rows = dict[str, dict[str, Any]]

#: More choices than this are not listed.
_CHOICES = 16
#: Types that argparse calls; any other callable takes text.
_TYPES: dict[Any, str] = {int: "int", float: "float", bool: "bool"}
_PARSER = "megatron.training.arguments"
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
#: Folders of Megatron whose files define options.
_SOURCES = ("core", "training", "rl", "inference")
#: Seconds after which the process that reads the parser is stopped.
_SECONDS = 120


def parsed() -> Rows:
    """Return the facts of all options of the Megatron that this process imports.

    Raises:
        ImportError: it has no Megatron, or not its training package.
    """
    with contextlib.redirect_stdout(sys.stderr):
        found = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        importlib.import_module(_PARSER).add_megatron_arguments(found)
    return facts(found)


def facts(of: argparse.ArgumentParser) -> Rows:
    """Return name -> type, nargs, choices, section and default of every option of a parser."""
    return {
        option.removeprefix("--"): {
            **_kind(action),
            "section": group.title,
            "default": None if action.nargs == 0 or action.default is None else str(action.default),
        }
        for group in of._action_groups
        for action in group._group_actions
        for option in action.option_strings
    }


def _kind(action: argparse.Action) -> dict[str, Any]:
    if action.nargs == 0:
        return {"type": "switch"}
    found: dict[str, Any] = {"type": _TYPES.get(action.type, "text")}
    choices = list(action.choices or ())
    if choices and len(choices) <= _CHOICES:  # signals depend on the platform
        names = [choice.name if isinstance(choice, enum.Enum) else str(choice) for choice in choices]
        found = {"type": "choice", "choices": names}
    return found | ({"nargs": str(action.nargs)} if action.nargs is not None else {})


def row(name: str, version: str) -> dict[str, Any] | None:
    """Return the facts of an option, without dashes.

    None: the Megatron that Python imports has no such option, is of another minor version, or is missing.
    """
    if not (_NAME.fullmatch(name) and importable(version) and _occurs(name)):
        return None
    return _rows().get(name)


@cache
def importable(version: str) -> bool:
    """Whether Python imports a Megatron of this minor version."""
    found = versions.importable_version()
    try:
        return bool(found) and versions.minor(found) == version
    except ValueError:
        return False


@cache
def _words() -> frozenset[str]:
    """Every name that occurs in the sources."""
    core = versions.importable()
    files = (file for part in _SOURCES for file in core.parent.joinpath(part).rglob("*.py")) if core else ()
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return frozenset(word for text in texts for word in _NAME.findall(text))


def _occurs(name: str) -> bool:
    """Whether the sources have the name, or the field that a switch turns off."""
    field = re.sub("^(no|disable)[-_]", "", name).replace("-", "_")
    return not _words().isdisjoint((name, name.replace("-", "_"), field))


@cache
def _rows() -> Rows:
    """Facts of all options; empty where Megatron cannot be imported."""
    if _PARSER in sys.modules:
        return parsed()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-m", __name__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return {}
    found: Rows = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(parsed()))
