"""The result of a command, as lines for a person or as one JSON document. Standard library only.

    with result(options.json):
        say(f"weights      {n:,} tensors", tensors=n)

prints the line, or at the end of the block `{"tensors": n}`. Outside of such a block `say` prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_facts: ContextVar[dict[str, Any] | None] = ContextVar("facts", default=None)


def add_json(command: argparse._ActionsContainer) -> None:
    """Add --json."""
    command.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def print_json(data: Any) -> None:
    """Print a JSON document. NaN and infinities, which JSON does not have, become null, paths become text."""
    print(json.dumps(_plain(data), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


@contextlib.contextmanager
def result(as_json: bool) -> Iterator[None]:
    """Print what `say` records in this block as one JSON document, if the block ends without an exception.

    Until then stdout is stderr, for whatever else is printed.
    """
    if not as_json:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr), _recorded() as facts:
        yield
    print_json(facts)


@contextlib.contextmanager
def part() -> Iterator[dict[str, Any]]:
    """Record facts of this block apart, for a caller who puts them into a larger result.

    Yields:
        the facts; they stay empty where lines are printed.
    """
    if _facts.get() is None:
        yield {}
        return
    with _recorded() as facts:
        yield facts


@contextlib.contextmanager
def _recorded() -> Iterator[dict[str, Any]]:
    facts: dict[str, Any] = {}
    token = _facts.set(facts)
    try:
        yield facts
    finally:
        _facts.reset(token)


def say(line: str | None = None, /, **facts: Any) -> None:
    """Print a line, or record facts for the JSON document: a list goes on the list of the same name.

    Args:
        line: None where only the document has the facts.
    """
    found = _facts.get()
    if found is None:
        if line is not None:
            print(line, flush=True)
        return
    for name, value in facts.items():
        if isinstance(value, list):
            found.setdefault(name, []).extend(value)
        else:
            found[name] = value
