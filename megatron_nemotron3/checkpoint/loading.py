"""What a Megatron command line says about the checkpoint to load. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

#: Where upstream keeps non-persistent checkpoints below --load.
NON_PERSISTENT = "non_persistent"


@dataclass(frozen=True)
class Options:
    """What a Megatron command line says about loading."""

    load: Path | None = None
    #: --ckpt-step; 0 and None both mean: what the tracker names.
    step: int | None = None
    #: Folder of global non-persistent checkpoints, if they are in use.
    non_persistent: Path | None = None
    #: --verify-integrity: a save ends with integrity.json.
    manifest: bool = False
    #: --pretrained-checkpoint: what a folder without a checkpoint starts from.
    pretrained: Path | None = None


def options(argv: Sequence[str]) -> Options:
    """Read Megatron's command line as its own parser would: the last of several counts.

    Addresses of object stores (msc://…) are not looked at.
    """
    named = option_value(argv, "--load")
    load = _local(named)
    # What an object store holds is not known here, so neither is whether --pretrained-checkpoint counts.
    pretrained = _local(option_value(argv, "--pretrained-checkpoint")) if load or not named else None
    step = option_value(argv, "--ckpt-step")
    non_persistent = None
    if option_value(argv, "--non-persistent-ckpt-type") == "global":
        given = option_value(argv, "--non-persistent-global-ckpt-dir")
        non_persistent = _local(given) if given else load and load / NON_PERSISTENT
    number = int(step) if step is not None and step.isascii() and step.isdigit() else None
    return Options(load, number or None, non_persistent, "--verify-integrity" in argv, pretrained)


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


def _local(value: str | None) -> Path | None:
    return None if not value or "://" in value else Path(value)
