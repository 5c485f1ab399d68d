"""Tensors and objects in archives: where the elements of a tensor are, and the data an object holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.archive import ArchiveError, ArchiveRecord, crc_problem, read_at, records
from megatron_nemotron3.checkpoints.metadata import (
    COMMON,
    INDEX,
    ITEM_SIZE,
    MOST_AXES,
    CheckpointError,
    CheckpointIndex,
    StoredObject,
    TensorChunk,
)
from megatron_nemotron3.checkpoints.pickles import Pickle, Refused, arguments, inert, loads
from megatron_nemotron3.common.files import Unreadable, open_outside

#: Largest pickle that is read, in bytes.
_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor inside a file: element [i, j] at byte offset + (i * stride[0] + j * stride[1]) * item size."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    #: Contains the elements.
    record: ArchiveRecord

    @property
    def end(self) -> int:
        """The byte after the last element."""
        if 0 in self.shape:
            return self.offset
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride))
        return self.offset + (last + 1) * ITEM_SIZE[self.dtype]


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file and yield its descriptor; errors raised inside the block get the file's path."""
    try:
        with open_outside(path) as file:
            yield file.fileno()
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    except Unreadable as problem:
        raise CheckpointError(str(problem)) from None
    except (ArchiveError, Refused) as problem:
        raise CheckpointError(f"{path}: {problem}") from None


def _read_pickle(descriptor: int, place: StoredObject) -> tuple[bytes, dict[str, ArchiveRecord]]:
    """Read the pickle of the archive at `place`. Returns the pickle and all records by name."""
    found = {record.name: record for record in records(descriptor, place.offset, place.length)}
    pickled = found.get("data.pkl")
    if pickled is None or pickled.size > _LIMIT:
        raise ArchiveError(
            f"the archive at {place.offset:,} has no record 'data.pkl', or one of more than 64 MiB"
        )
    if pickled.crc and (problem := crc_problem(descriptor, pickled)):
        raise ArchiveError(problem)
    byteorder = found.get("byteorder")
    if byteorder and bytes(read_at(descriptor, byteorder.offset, byteorder.size)) != b"little":
        raise Refused(f"the archive at {place.offset:,} is not little-endian")
    return bytes(read_at(descriptor, pickled.offset, pickled.size)), found


def chunk_layout(descriptor: int, chunk: TensorChunk, dtype: str) -> TensorLayout:
    """Locate the elements of a chunk of a torch_dist tensor; only headers are read."""
    data, found = _read_pickle(descriptor, chunk)
    if "version" not in found:
        raise ArchiveError(f"the archive at {chunk.offset:,} has no record 'version'")
    tensor = Pickle(data, _TENSOR_TABLE, persistent=_storage_of).load()
    if not isinstance(tensor, _PickledTensor):
        raise Refused(f"the archive at {chunk.offset:,} holds a {type(tensor).__name__}, not a tensor")
    what = f"the tensor at {chunk.offset:,}"
    record = found.get(f"data/{tensor.storage}")
    if record is None:
        raise ArchiveError(f"{what} is in record 'data/{tensor.storage}', which is missing")
    begin = record.offset + tensor.begin * ITEM_SIZE[tensor.dtype]
    layout = TensorLayout(tensor.dtype, tensor.shape, tensor.stride, begin, record)
    if layout.end > record.offset + record.size:
        raise ArchiveError(
            f"{what} needs {layout.end - record.offset:,} bytes of storage, record {record.name!r} has "
            f"{record.size:,}"
        )
    if (layout.dtype, layout.shape) != (dtype, chunk.sizes):
        raise ArchiveError(
            f"the chunk at {chunk.offset:,} holds {layout.dtype} of shape {list(layout.shape)}, "
            f"{INDEX} says {dtype} of shape {list(chunk.sizes)}"
        )
    return layout


@dataclass(frozen=True)
class _Storage:
    dtype: str | None
    key: str


@dataclass(frozen=True)
class _PickledTensor:
    """A tensor as its pickle describes it; `begin` counts elements of the storage."""

    dtype: str
    storage: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _storage_of(pid: Any) -> _Storage:
    """Map the persistent id of a storage to its type and key."""
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[2], str):
        raise Refused(f"it refers to a {type(pid).__name__} that is not a storage")
    return _Storage(pid[1] if isinstance(pid[1], str) else None, pid[2])


def _rebuilt_tensor(storage: Any, begin: Any, shape: Any, stride: Any, *rest: Any) -> _PickledTensor:
    """Take the arguments of torch._utils._rebuild_tensor_v2, or of v3, which ends with the dtype."""
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    if dtype is None and len(rest) >= 3:
        dtype = rest[2]
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) > MOST_AXES:
        raise Refused(f"its tensor has no shape and stride of at most {MOST_AXES} axes")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (begin, *shape, *stride)):
        raise Refused("its offset, shape or stride holds a value that is not a whole number from 0 to 2^62")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise Refused(f"its tensor has the unknown type {dtype!r:.40}" if dtype else "its tensor has no type")
    if len(shape) != len(stride) or math.prod(shape) >= 1 << 62:
        raise Refused(f"its tensor has shape {shape!r:.60} and stride {stride!r:.60}")
    return _PickledTensor(dtype, storage.key, begin, tuple(shape), tuple(stride))


STORAGES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
    **{"ComplexDouble": "complex128", "ComplexFloat": "complex64"},
}
#: Names in the pickle of one tensor.
_TENSOR_TABLE: dict[tuple[str, str], Any] = {
    **{("torch", dtype): dtype for dtype in ITEM_SIZE},
    **{("torch", f"{name}Storage"): dtype for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): None,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *rest: data,
    ("collections", "OrderedDict"): dict,
}


def common_state(index: CheckpointIndex) -> dict[str, Any]:
    """Read the state stored in addition to the tensors ("iteration", "args", …), with classes as `Inert`.

    As in Megatron, common.pt counts where a checkpoint has both forms.
    """
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
    return state


def stored_object(folder: Path, place: StoredObject) -> Any:
    """Read a pickled object of plain data without importing what it names; tensors in it become None."""
    with opened(folder / place.file) as descriptor:
        data, _ = _read_pickle(descriptor, place)
        return loads(data, _DATA_TABLE, stubs=_DATA_STUBS, persistent=lambda pid: None)


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
