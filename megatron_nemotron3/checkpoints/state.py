"""What a checkpoint says about the run that saved it: its arguments and its scheduler."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import checkpoint_path, latest_iteration
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.checkpoints.pickles import Inert
from megatron_nemotron3.checkpoints.read import common_state
from megatron_nemotron3.checkpoints.resume import load_options
from megatron_nemotron3.checkpoints.structure import check_structure


@dataclass(frozen=True)
class StoredState:
    """What a checkpoint says about the run that saved it."""

    #: Of the command line, by the names of Megatron's parser; values of classes are stand-ins.
    args: Mapping[str, Any]
    #: "opt_param_scheduler"; empty if it has none.
    scheduler: Mapping[str, Any]


def stored_state(path: Path) -> StoredState | None:
    """Read the state of one checkpoint; None if its format has none that can be read."""
    index = check_structure(path).index
    if index is None:
        return None
    try:
        state = common_state(index)
    except CheckpointError:
        return None
    scheduler = state.get("opt_param_scheduler")
    return StoredState(stored_arguments(state), scheduler if isinstance(scheduler, dict) else {})


def stored_arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command line's arguments in a checkpoint's common state; empty if it has none."""
    args = state.get("args")
    values = args.state if isinstance(args, Inert) else vars(args) if isinstance(args, Namespace) else {}
    return values if isinstance(values, dict) else {}


def loaded_state(argv: Sequence[str]) -> tuple[int, StoredState] | None:
    """Return the iteration that a Megatron command line goes on from, and its state; None if it has none."""
    options = load_options(argv)
    if options.load is None:
        return None
    step = options.step or latest_iteration(options.load)
    state = step and stored_state(checkpoint_path(options.load, step))
    return (step, state) if step and state else None
