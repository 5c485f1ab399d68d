"""What a checkpoint stores besides tensors: arguments of the run that saved it, its iteration, its scheduler.

Classes in it are not imported: their instances are `Inert`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.keys import pattern_of_names
from megatron_nemotron3.checkpoints.folders import checkpoint_path, latest_iteration
from megatron_nemotron3.checkpoints.metadata import (
    COMMON,
    CheckpointError,
    CheckpointIndex,
    StoredObject,
    explained,
)
from megatron_nemotron3.checkpoints.pickles import Inert, Pickle, arguments, inert
from megatron_nemotron3.checkpoints.read import MappedFile, read_pickle
from megatron_nemotron3.checkpoints.resume import load_options
from megatron_nemotron3.checkpoints.structure import CONFIG, check_structure, complete_index
from megatron_nemotron3.models.stack_specs import ARGUMENT

#: Objects of the state in torch's own format.
_STATE_OBJECTS = ("args", "iteration", "checkpoint_version")
#: Names in stored arguments: Megatron's enumerations, dtypes and a few standard classes.
_DATA_TABLE: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): inert("Namespace"),
    ("types", "SimpleNamespace"): inert("SimpleNamespace"),
    ("collections", "OrderedDict"): dict,
    ("signal", "Signals"): arguments,
    ("pathlib", "PosixPath"): arguments,
    ("_codecs", "encode"): arguments,
    **{(module, name): arguments for module in ("builtins", "__builtin__") for name in ("getattr", "set")},
    ("datetime", "timedelta"): arguments,
}
_DATA_STUBS = ("megatron.", "nvidia_resiliency_ext.", "torch.", "numpy.", "transformer_engine.")


def stored_object(folder: Path, place: StoredObject) -> Any:
    """Read a pickled object of plain data; tensors in it become None."""
    path = folder / place.file
    with explained(path):
        data, _ = read_pickle(MappedFile(path), place)
        return Pickle(data, _DATA_TABLE, _DATA_STUBS, lambda pid: None).loaded()


def common_state(index: CheckpointIndex) -> dict[str, Any]:
    """Read the state of a torch_dist folder. As in Megatron, common.pt counts where it has both forms."""
    place = index.common_state
    path = index.folder / COMMON
    if place is None or path.exists():
        try:
            place = StoredObject(COMMON, 0, path.stat().st_size)
        except OSError as problem:
            raise CheckpointError(f"{path}: {problem.strerror}") from None
    state = stored_object(index.folder, place)
    if isinstance(state, list) and state:  # the object form: a list of one
        state = state[0]
    if not isinstance(state, dict):
        raise CheckpointError(f"{index.folder / place.file}: the common state is a {type(state).__name__}")
    return _with_pattern(index, state)


def read_dcp_state(index: CheckpointIndex) -> dict[str, Any]:
    """Read the state in torch's own format, which has an object for each entry; entries may be missing."""
    objects = ((name, index.objects.get(name)) for name in _STATE_OBJECTS)
    return _with_pattern(index, {n: stored_object(index.folder, at) for n, at in objects if at is not None})


def _with_pattern(index: CheckpointIndex, state: dict[str, Any]) -> dict[str, Any]:
    """Complete arguments without a pattern, as of a list of layer configs, whose experts may differ."""
    args = stored_arguments(state)
    if args and not (args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")):
        found = pattern_of_names(index.tensors, args)
        args |= {"hybrid_layer_pattern": found, ARGUMENT: args.get(ARGUMENT)} if found else {}
    return state


def read_state(index: CheckpointIndex) -> dict[str, Any]:
    """Read the state of a folder in either format; torch's own has no metadata.json."""
    return common_state(index) if (index.folder / CONFIG).exists() else read_dcp_state(index)


@dataclass(frozen=True)
class StoredState:
    """What a checkpoint says about the run that saved it."""

    #: Of the command line, by the names of Megatron's parser; values of classes are stand-ins.
    args: Mapping[str, Any]
    #: "opt_param_scheduler"; empty if it has none.
    scheduler: Mapping[str, Any]
    #: How the distributed optimizer's state is divided, as Megatron names it; "" if it is not stated.
    sharding: str = ""


def stored_state(path: Path) -> StoredState | None:
    """Read the state of one checkpoint; None if its format has none that can be read."""
    index = check_structure(path).index
    if index is None:
        return None
    try:
        state = common_state(index)
    except CheckpointError:
        return None
    scheduler, metadata = (
        found if isinstance(found, dict) else {}
        for found in (state.get("opt_param_scheduler"), state.get("content_metadata"))
    )
    return StoredState(
        stored_arguments(state), scheduler, str(metadata.get("distrib_optim_sharding_type") or "")
    )


def stored_arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command line's arguments in a checkpoint's common state; empty if it has none."""
    args = state.get("args")
    return args.state if isinstance(args, Inert) and isinstance(args.state, dict) else {}


def read_arguments(folder: Path) -> dict[str, Any]:
    """Return the arguments in a complete checkpoint; {} if they cannot be read."""
    index, _ = complete_index(folder)
    try:
        return stored_arguments(read_state(index))
    except CheckpointError:
        return {}


def loaded_state(argv: Sequence[str]) -> tuple[int, StoredState] | None:
    """Return the iteration that a Megatron command line goes on from, and its state; None if it has none."""
    options = load_options(argv)
    if options.load is None:
        return None
    step = options.step or latest_iteration(options.load)
    state = step and stored_state(checkpoint_path(options.load, step))
    return (step, state) if step and state else None
