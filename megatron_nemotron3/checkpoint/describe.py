"""What a checkpoint is, in lines: iteration, the layout that wrote it, tensors and bytes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.archive import ArchiveError, crc_problem, read_at, records
from megatron_nemotron3.checkpoint.metadata import (
    COMMON,
    ITEM_SIZE,
    CheckpointError,
    CheckpointIndex,
    StoredObject,
)
from megatron_nemotron3.checkpoint.read import opened
from megatron_nemotron3.checkpoint.unpickle import Inert, inert, loads

#: Larger common states are not read for a description.
_LIMIT = 64 << 20
_LAYOUT = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "CP": "context_parallel_size",
    "DP": "data_parallel_size",
}


def common_state(index: CheckpointIndex) -> dict[str, Any]:
    """What Megatron stored beside the tensors: "iteration", "args" and more; classes as `Inert`.

    Raises:
        CheckpointError: it is damaged or names something that is not data.
    """
    place = index.common_state
    if place is None:
        path = index.folder / COMMON
        try:
            place = StoredObject(COMMON, 0, path.stat().st_size)
        except OSError as problem:
            raise CheckpointError(f"{path}: {problem.strerror}") from None
    state = stored_object(index.folder, place, "the common state")
    if isinstance(state, list) and state:  # the object form: a list of one
        state = state[0]
    if not isinstance(state, dict):
        raise CheckpointError(f"{index.folder / place.file}: the common state is a {type(state).__name__}")
    return state


def stored_object(folder: Path, place: StoredObject, what: str) -> Any:
    """A pickled object of plain data, read without importing what it names; tensors in it become None.

    Args:
        what: its name, for messages.

    Raises:
        CheckpointError: it is damaged, larger than 64 MiB, or names something that is not data.
    """
    with opened(folder / place.file) as descriptor:
        found = {record.name: record for record in records(descriptor, place.offset, place.length)}
        record = found.get("data.pkl")
        if record is None or record.size > _LIMIT:
            raise ArchiveError(f"{what} at byte {place.offset:,} has no data.pkl of usual size")
        if record.crc and (wrong := crc_problem(descriptor, record)):
            raise ArchiveError(wrong)
        data = bytes(read_at(descriptor, record.offset, record.size))
        return loads(data, DATA_TABLE, stubs=DATA_STUBS, persistent=_nothing)


def describe(index: CheckpointIndex) -> list[str]:
    """Lines for a reader; what cannot be read safely is said, not raised."""
    lines = []
    try:
        state = common_state(index)
    except CheckpointError as problem:
        lines.append(f"arguments    not shown: {problem}")
    else:
        lines.append(f"iteration    {_shown(state.get('iteration'))}")
        if (written := layout_of(state)) is not None:
            lines.append(f"written with {written}; the weights load into any other layout")
    elements: Counter[str] = Counter()
    for tensor in index.tensors.values():
        elements[tensor.dtype] += tensor.numel
    total = sum(count * ITEM_SIZE[dtype] for dtype, count in elements.items())
    kinds = ", ".join(f"{count:,} in {dtype}" for dtype, count in elements.most_common())
    chunks = sum(len(tensor.chunks) for tensor in index.tensors.values())
    model = sum(
        math.prod(tensor.shape)
        for name, tensor in index.tensors.items()
        if "optimizer" not in name.split(".")
    )
    lines.append(
        f"tensors      {len(index.tensors):,} in {chunks:,} chunks; elements {kinds}: {total:,} bytes"
    )
    lines.append(f"of these     {model:,} elements are the model's, the rest is optimizer state")
    lines.append(f"objects      {len(index.objects):,}")
    lines.append(f"files        {len(index.files):,} with {sum(index.files.values()):,} bytes")
    return lines


def layout_of(state: dict[str, Any]) -> str | None:
    """ "TP2 PP1 … on 2 ranks" from the stored arguments; None if there are none."""
    arguments = state.get("args")
    if not isinstance(arguments, Inert) or not isinstance(arguments.state, dict):
        return None
    sizes = {short: arguments.field(name) for short, name in _LAYOUT.items()}
    known = [f"{short}{size}" for short, size in sizes.items() if type(size) is int]
    if not known:
        return None
    ranks = arguments.field("world_size")
    return " ".join(known) + (f" on {ranks} rank{'s' * (ranks != 1)}" if type(ranks) is int else "")


def _shown(value: Any) -> str:
    return str(value) if type(value) is int else "not stored"


def _nothing(pid: Any) -> None:
    """Tensors inside the common state (random states) are not read."""


def _plain(*args: Any) -> tuple[Any, ...]:
    return args


#: Stored arguments: plain values, Megatron's enumerations, dtypes and a few standard classes.
DATA_TABLE: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): inert("Namespace"),
    ("types", "SimpleNamespace"): inert("SimpleNamespace"),
    ("collections", "OrderedDict"): dict,
    ("signal", "Signals"): _plain,
    ("pathlib", "PosixPath"): _plain,
    ("_codecs", "encode"): _plain,
    **{(module, name): _plain for module in ("builtins", "__builtin__") for name in ("getattr", "set")},
    ("datetime", "timedelta"): _plain,
}
DATA_STUBS = ("megatron.", "nvidia_resiliency_ext.", "torch.", "numpy.", "transformer_engine.")
