"""Where the elements of a stored tensor lie in its file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoint.archive import ArchiveError, crc_problem, read_at, records
from megatron_nemotron3.checkpoint.metadata import (
    ITEM_SIZE,
    MOST_AXES,
    CheckpointError,
    StoredObject,
)
from megatron_nemotron3.checkpoint.unpickle import Refused, loads

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor inside a file: element [i, j] at byte offset + (i * stride[0] + j * stride[1]) * item size."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def span(self, rows: range) -> tuple[int, int]:
        """(first byte, number of bytes) of the range that holds `rows` of the first axis."""
        item = ITEM_SIZE[self.dtype]
        shape = (len(rows), *self.shape[1:]) if self.shape else ()
        if 0 in shape:
            return self.offset, 0
        first = rows.start * self.stride[0] if self.shape else 0
        last = first + sum((n - 1) * step for n, step in zip(shape, self.stride))
        return self.offset + first * item, (last + 1 - first) * item


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file descriptor to read from; what goes wrong inside names the file.

    Raises:
        CheckpointError: the file cannot be read, or an ArchiveError or Refused inside.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    except (ArchiveError, Refused) as problem:
        raise CheckpointError(f"{path}: {problem}") from None


def tensor_layout(descriptor: int, place: StoredObject) -> TensorLayout:
    """Where the elements of the tensor in the archive at `place` are; reads its headers only.

    Raises:
        ArchiveError: the archive is damaged.
        Refused: it does not hold exactly one plain tensor.
    """
    found = {r.name: r for r in records(descriptor, place.offset, place.length)}
    for name in ("data.pkl", "version"):
        if name not in found:
            raise ArchiveError(f"the archive at {place.offset:,} has no record {name!r}")
    pickled = found["data.pkl"]
    if pickled.crc and (problem := crc_problem(descriptor, pickled)):
        raise ArchiveError(problem)
    text = bytes(read_at(descriptor, pickled.offset, pickled.size))
    tensor = loads(text, TENSOR_TABLE, persistent=storage_of)
    if not isinstance(tensor, _Tensor):
        raise Refused(f"the archive at {place.offset:,} holds a {type(tensor).__name__}, not a tensor")
    byteorder = found.get("byteorder")
    if byteorder and bytes(read_at(descriptor, byteorder.offset, byteorder.size)) != b"little":
        raise Refused(f"the archive at {place.offset:,} is not little-endian")
    data = found.get(f"data/{tensor.storage}")
    if data is None:
        raise ArchiveError(f"the archive at {place.offset:,} has no record 'data/{tensor.storage}'")
    item = ITEM_SIZE[tensor.dtype]
    layout = TensorLayout(tensor.dtype, tensor.shape, tensor.stride, data.offset + tensor.begin * item)
    first, length = layout.span(range(tensor.shape[0] if tensor.shape else 1))
    if first + length > data.offset + data.size:
        raise ArchiveError(
            f"the tensor at {place.offset:,} needs {first + length - data.offset:,} bytes of storage, "
            f"record {data.name!r} has {data.size:,}"
        )
    return layout


@dataclass(frozen=True)
class _Storage:
    dtype: str | None
    key: str


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    storage: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def storage_of(pid: Any) -> _Storage:
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[2], str):
        raise Refused(f"it refers to a {type(pid).__name__} that is no storage")
    return _Storage(pid[1] if isinstance(pid[1], str) else None, pid[2])


def _rebuild(storage: Any, begin: Any, shape: Any, stride: Any, *rest: Any) -> _Tensor:
    """Arguments of torch._utils._rebuild_tensor_v2, and of v3, which has the dtype in the seventh place."""
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    if dtype is None and len(rest) >= 3:
        dtype = rest[2]
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) > MOST_AXES:
        raise Refused(f"its tensor has no shape and stride of at most {MOST_AXES} axes")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (begin, *shape, *stride)):
        raise Refused("its tensor has numbers that are none, below 0 or too large")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise Refused(
            f"its tensor has the type {dtype!r:.40}" if isinstance(dtype, str) else "its tensor has no type"
        )
    if len(shape) != len(stride) or math.prod(shape) >= 1 << 62:
        raise Refused(f"its tensor has shape {shape!r:.60} and stride {stride!r:.60}")
    return _Tensor(dtype, storage.key, begin, tuple(shape), tuple(stride))


def _parameter(data: Any, *rest: Any) -> Any:
    return data


STORAGES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
    **{"ComplexDouble": "complex128", "ComplexFloat": "complex64"},
}
#: What the pickle of one tensor names.
TENSOR_TABLE: dict[tuple[str, str], Any] = {
    **{("torch", dtype): dtype for dtype in ITEM_SIZE},
    **{("torch", f"{name}Storage"): dtype for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): None,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): dict,
}
