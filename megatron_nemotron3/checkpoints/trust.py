"""Objects of a checkpoint that run code when Megatron reads them.

Megatron's loader unpickles what it finds: the index, every object (`common_state`, `rng_state`,
`…/_extra_state`), and with them whatever function they name. So a checkpoint is read here first, by names.
Tensors are not read: torch loads them by an allow-list of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.metadata import (
    INDEX,
    ITEM_SIZE,
    ArchiveError,
    CheckpointError,
    CheckpointIndex,
    StoredObject,
    TensorChunk,
    explained,
    read_metadata,
)
from megatron_nemotron3.checkpoints.pickles import (
    Inert,
    Pickle,
    Refused,
    arguments,
    inert,
    member,
    stand_ins,
    try_all,
)
from megatron_nemotron3.checkpoints.read import STORAGES, ArchiveRecord, HeldBytes, MappedFile, records
from megatron_nemotron3.common.options import flag
from megatron_nemotron3.common.switches import TRUST_CHECKPOINT, environment

OPTION = "--trust-checkpoint"
#: Part of the names of states of modules, whose tensors of bytes are pickles themselves.
_EXTRA = "_extra_state"
#: Longest pickle that is read, in bytes, and how many of an object's count for limits of memory and time.
_LIMIT, _COUNTED = 64 << 20, 4 << 20
#: Longest object, in bytes, that is compared with others.
_SMALL = 1 << 16
#: Pickles at the begin of a file of torch.save without zip.
_LEGACY = 5
_Storage = inert("Storage")

#: Names in pickles of a checkpoint: what Megatron (0.16 to main), Bridge, Transformer Engine and we write, by
#: module: classes of plain data, enumerations among them, and functions that make tensors and arrays. Each is
#: safe for a loader that imports it and calls it with any arguments. `getattr`, by which Python 3.11 pickles
#: members of enumerations, is safe only on classes of this table.
_NAMES = {
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "signal": "Signals",
    "pathlib": "PosixPath PurePosixPath Path",
    "pathlib._local": "PosixPath PurePosixPath Path",  # Python 3.13
    "datetime": "timedelta datetime timezone",
    "torch": "device Size Tensor Generator",
    "torch._C": "Generator",
    "torch.nn.parameter": "Parameter",
    "numpy": "ndarray dtype",
    "numpy.dtypes": "UInt32DType",
    "megatron.core.enums": "ModelType Fp8Recipe Fp4Recipe",
    "megatron.core.dist_checkpointing.mapping": "ShardedObject ShardedTensor",
    "megatron.core.dist_checkpointing.tensor_aware_state_dict": "MCoreTensorAwareStateDict",
    "megatron.core.transformer.enums": "ModelType LayerType AttnType AttnMaskType AttnBackend "
    "CudaGraphModule CudaGraphScope InferenceCudaGraphScope",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState RerunValidationStatus Call "
    "Caller",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig",
    "megatron.core.inference.config": "PrefixCachingEvictionPolicy PrefixCachingCoordinatorPolicy "
    "KVCacheManagementMode CudaGraphSizingDistribution AsyncScheduleMode",
    "megatron.core.inference.moe": "InferenceGroupedGemmBackend",
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "transformer_engine.common.recipe": "DelayedScaling Float8CurrentScaling Float8BlockScaling "
    "MXFP8BlockScaling NVFP4BlockScaling Format _FormatHelper MMParams QParams",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
    "_rebuild_parameter_with_state",
}
#: Types, which a pickle may call or name as a factory.
_BUILTINS = "dict list tuple set frozenset int float bool complex str bytearray slice"
#: Functions of torch._utils that make a tensor; their stand-ins hold (storage, offset, shape, stride, …).
_TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_FLOAT8 = ("Float8_e4m3fn", "Float8_e5m2")


def trust_option(**details: Any) -> Any:
    """--trust-checkpoint, for `trusting`."""
    return flag("load a checkpoint with objects outside the allow-list, which may run code", **details)


def trusting(trusted: bool) -> contextlib.AbstractContextManager[None]:
    """Inside the block `require_trusted` refuses nothing, here and in processes that are started."""
    return environment(TRUST_CHECKPOINT, "1") if trusted else contextlib.nullcontext()


def require_trusted(folder: Path) -> None:
    """Raise ValueError if a checkpoint folder has a hostile object, unless the user trusts it."""
    if os.environ.get(TRUST_CHECKPOINT, "0") in ("", "0") and (found := hostile_objects(folder)):
        more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
        raise ValueError(
            f"{found[0]}{more}; Megatron would run it: take another checkpoint, or give {OPTION} "
            f"({TRUST_CHECKPOINT}=1) if you know who wrote this one"
        )


def hostile_objects(folder: Path, index: CheckpointIndex | None = None) -> list[str]:
    """Return a message for each pickle of a Megatron checkpoint that names what no checkpoint needs.

    Args:
        folder: one checkpoint, not the folder of several.
        index: the folder's, if it has been read.
    """
    if index is None and os.path.lexists(folder / INDEX):
        try:
            index = read_metadata(folder)
        except CheckpointError as problem:
            return [str(problem)]
    places: dict[Path, list[tuple[str, int, int]]] = {}
    for name, item in index.items() if index is not None else ():
        if not isinstance(item, TensorChunk) or _EXTRA in name:
            places.setdefault(folder / item.file, []).append((name, item.offset, item.length))
    for path in (*folder.glob("*.pt"), *folder.glob("mp_rank_*/*.pt")):
        if ".dirty" not in path.suffixes:  # a local checkpoint whose save was interrupted
            places[path] = [("the file", 0, -1)]
    problems: list[str] = []
    size = 0
    found: list[tuple[str, Callable[[], None]]] = []
    seen = set()  # most states of modules are empty, and the same to the byte
    for path, items in sorted(places.items()):
        try:
            with explained(path):
                file = MappedFile(path)
                for name, offset, length in items:
                    extra = _EXTRA in name
                    length = file.size if length < 0 else length
                    size += min(length, _COUNTED)
                    try:
                        if length <= _SMALL:
                            content = (extra, bytes(file(offset, length)))
                            if content in seen:
                                continue
                            seen.add(content)
                        found.append((f"{path}: {name}", _reader(file, offset, length, extra)))
                    except (ArchiveError, Refused) as problem:
                        problems.append(f"{path}: {name} holds names that are unknown: {problem}")
        except CheckpointError as problem:
            problems.append(str(problem))
    tried = try_all([read for _, read in found], size)
    return [*(f"{found[n][0]} {tried[n].removeprefix('it ')}" for n in sorted(tried)), *problems]


def problem_of(path: Path) -> str:
    """Why an archive of torch.save must not be read: its names, memory or time; "" if it may be."""
    file = MappedFile(path)
    return try_all([_reader(file, 0, file.size, False)], min(file.size, _COUNTED)).get(0, "")


def _reader(file: MappedFile, offset: int, length: int, extra: bool) -> Callable[[], None]:
    """Find the pickle of a torch.save archive, and what reads it and those in its tensors of bytes."""
    places = {record.name: record for record in records(file, StoredObject("", offset, length))}
    if "constants.pkl" in places:
        raise Refused("it is a program of TorchScript")
    data = _record(file, places.get("data.pkl"))
    # Read before the fork: what reads remote files does not outlive it.
    states = {name: _record(file, places[name]) for name in places if extra and name.startswith("data/")}

    def read() -> None:
        for key in _keys_of_states(Pickle(data, _ALLOWED, persistent=_storage).checked(), extra):
            if (name := f"data/{key}") not in states:
                states[name] = _record(file, places.get(name))
            _read_nested(states.get(name))

    return read


def _record(file: MappedFile, place: ArchiveRecord | None) -> bytes:
    if place is None or place.size > _LIMIT:
        raise Refused(f"its pickle is missing, or longer than {_LIMIT >> 20} MiB")
    return bytes(file(place.offset, place.size))


def _keys_of_states(one: Any, extra: bool) -> Iterator[str]:
    """Yield the keys of storages whose bytes are loaded as a pickle: of tensors that are a module's state."""
    if isinstance(one, dict):
        for key, value in one.items():
            yield from _keys_of_states(value, isinstance(key, str) and _EXTRA in key)
    elif isinstance(one, (list, set, frozenset, tuple)):
        for value in one:  # a tuple is also a parameter, or a tensor with its class
            yield from _keys_of_states(value, extra and isinstance(one, tuple))
    elif isinstance(one, Inert) and type(one).__name__ in _TENSORS:
        if extra and isinstance(one.args[0], _Storage) and one.args[2] != (0,):
            if one.args[1] != 0 or len(one.args[2]) != 1 or one.args[3] != (1,):
                raise Refused(f"it has a state that is a view of shape {one.args[2]!r:.60}")
            yield str(one.args[0].args[2])
    elif isinstance(one, Inert):
        data = one.field("data") if type(one).__name__ == "ShardedObject" else one.state
        yield from _keys_of_states((one.args, data), extra)


def _read_nested(data: Any) -> None:
    """Read bytes that are loaded as a pickle or as a file of torch.save."""
    if not isinstance(data, bytes):
        raise Refused(f"it has a {type(data).__name__} where bytes of a pickle belong")
    if data[:4] == b"PK\3\4":
        _reader(HeldBytes(data), 0, len(data), False)()
    elif data:
        Pickle(data, _ALLOWED, persistent=_storage).checked(_LEGACY)


def _storage(pid: Any) -> Any:
    return _Storage(*pid)


def _encoded(text: Any = "", encoding: Any = "") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise Refused(f"it encodes a {type(text).__name__} by {encoding!r:.40}, not bytes as protocol 2 does")
    return text.encode("latin-1")


def _rebuilt(function: Any, cls: Any, values: Any, *rest: Any) -> Any:
    if not isinstance(function, type) or function.__name__ not in _TENSORS:
        raise Refused("it rebuilds a tensor by something else than a function of torch")
    return function(*values), cls, rest


class _BytesIO(Inert):
    """Transformer Engine 1 has its state in one."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        for data in args:
            _read_nested(data)

    def __setstate__(self, state: Any) -> None:
        _read_nested(state[0] if isinstance(state, tuple) and state else state)


_ALLOWED: dict[tuple[str, str], Any] = {
    **stand_ins(_NAMES),
    **{("torch", name): name for name in ITEM_SIZE},
    **{("torch", f"{name}Storage"): f"{name}Storage" for name in (*STORAGES, *_FLOAT8)},
    ("_codecs", "encode"): _encoded,
    ("collections", "OrderedDict"): dict,
    ("collections", "Counter"): dict,
    ("collections", "defaultdict"): lambda *args: {},
    ("collections", "deque"): lambda *args: [*args],
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
    ("torch.storage", "_load_from_bytes"): _read_nested,
    ("megatron.core.safe_globals", "safe_load_from_bytes"): _read_nested,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
    ("io", "BytesIO"): _BytesIO,
    ("_io", "BytesIO"): _BytesIO,
}
for _module in ("builtins", "__builtin__"):
    _ALLOWED |= {(_module, name): arguments for name in _BUILTINS.split()}
    _ALLOWED |= {(_module, "getattr"): member, (_module, "bytes"): lambda *args: args or b""}
