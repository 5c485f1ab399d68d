"""Read options out of a Megatron command line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def option_values(argv: Sequence[str], name: str) -> tuple[str, ...] | None:
    """Return the words that follow an option of Megatron's command line; None if it is not given.

    As for Megatron's own parser, the last of several occurrences counts.
    """
    found = None
    for at, word in enumerate(argv):
        if word == name:
            found = tuple(takewhile(lambda following: not following.startswith("--"), argv[at + 1 :]))
        elif word.startswith(f"{name}="):
            found = (word.partition("=")[2],)
    return found


def option_value(argv: Sequence[str], name: str) -> str | None:
    """Return the first word of `option_values`; None if there is none."""
    values = option_values(argv, name)
    return values[0] if values else None
