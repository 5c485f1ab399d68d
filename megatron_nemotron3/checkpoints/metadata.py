"""The index of a torch_dist folder, a pickle of torch.distributed.checkpoint's Metadata, read without torch.

The .distcp files have chunks, one torch.save archive after another; metadata.json is written last. What is
not a tensor is in common.pt, or since megatron-core 0.19 in the object `common_state/…`.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_nemotron3.checkpoints.pickles import Inert, Pickle, Refused, arguments, member, stand_ins
from megatron_nemotron3.common.files import Unreadable, printable, read_outside

INDEX = ".metadata"
COMMON = "common.pt"
#: Longest index and longest JSON file that are read, in bytes. Ultra's released index has 6 MB.
_INDEX_LIMIT = 1 << 30
JSON_LIMIT = 64 << 20

#: Bytes per element; two float4 elements are packed into one of one byte.
ITEM_SIZE = {
    **dict.fromkeys(["float64", "int64", "uint64", "complex64"], 8),
    **dict.fromkeys(["float32", "int32", "uint32"], 4),
    **dict.fromkeys(["float16", "bfloat16", "int16", "uint16"], 2),
    **dict.fromkeys(["int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"], 1),
    **dict.fromkeys(["float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"], 1),
    "complex128": 16,
}

#: Largest number of dimensions, as in torch.
MOST_AXES = 64


class CheckpointError(ValueError):
    """A checkpoint file is damaged. The message begins with its path and is one printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ArchiveError(ValueError):
    """The bytes are not what they should be. The message does not name the file."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors that are raised inside the block get the file's path."""
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    except Unreadable as problem:
        raise CheckpointError(str(problem)) from None
    except (ArchiveError, Refused) as problem:
        raise CheckpointError(f"{path}: {problem}") from None


def read_file(path: Path, limit: int) -> bytes:
    """Read a file of a checkpoint."""
    with explained(path):
        return read_outside(path, limit=limit)


def regular_file_size(path: Path, folder: Path) -> int:
    """Return the size of a file of `folder`."""
    try:
        real = Path(os.path.realpath(path, strict=True))
        found = os.stat(real)
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: it is not a regular file")
    home = Path(os.path.realpath(folder))
    inside = [home]
    if home.parent.name == "snapshots":  # models--…/snapshots/REVISION links to models--…/blobs
        inside.append(home.parent.parent / "blobs")
    if real.parent not in inside:
        raise CheckpointError(
            f"{path}: it is a link to {real}, outside of {folder}: give the folder with the file, or copy it"
        )
    return found.st_size


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    try:
        data = json.loads(read_file(path, limit))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: it is not JSON: {problem}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: it holds a {type(data).__name__}, not an object")
    return data


def read_manifest(path: Path) -> dict[str, Any]:
    """Read what a conversion wrote of its files: name -> bytes and CRC32, which are not checked here."""
    files = read_json(path).get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: it lists no files")
    return files


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A pickled object: bytes [offset, offset + length) of `file`."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorChunk(StoredObject):
    """The part of a tensor of shape `sizes` that begins at `offsets`; stored as a torch.save archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DistTensor:
    """One tensor: torch's dtype name without "torch.", global shape, chunks in file order."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


def count_elements(tensors: Iterable[Any]) -> dict[str, int]:
    """Count the elements of each dtype, most frequent first; tensors have `dtype` and `nbytes`."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += tensor.nbytes // ITEM_SIZE[tensor.dtype]
    return dict(elements.most_common())


def elements_text(elements: Mapping[str, int]) -> str:
    """Return "1,024 in bfloat16, 16 in float32" for what `count_elements` returned."""
    return ", ".join(f"{count:,} in {dtype}" for dtype, count in elements.items())


@dataclass(frozen=True)
class CheckpointIndex:
    """The index of one checkpoint folder."""

    folder: Path
    tensors: dict[str, DistTensor]
    objects: dict[str, StoredObject]

    @property
    def files(self) -> dict[str, int]:
        """File name -> smallest size in bytes that holds everything the index places in the file."""
        ends: dict[str, int] = {}
        for _, item in self.items():
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        return dict(sorted(ends.items()))

    def items(self) -> list[tuple[str, StoredObject]]:
        """All chunks and objects, by the names of their tensors and their own."""
        chunks = ((name, chunk) for name, tensor in self.tensors.items() for chunk in tensor.chunks)
        return [*chunks, *self.objects.items()]

    @property
    def common_state(self) -> StoredObject | None:
        """The object that holds arguments and iteration since megatron-core 0.19; None: see common.pt."""
        return next((v for k, v in self.objects.items() if k.startswith("common_state/")), None)


#: Module -> classes in an index, also those of the save plans that Megatron up to 0.15 cached in it.
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata "
    "ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix SerializationFormat",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData "
    "BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "io": "BytesIO",
}
_INDEX_TABLE: dict[tuple[str, str], Any] = {
    **{("torch", dtype): dtype for dtype in ITEM_SIZE},
    **stand_ins(_INDEX_CLASSES),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): arguments,
    ("builtins", "getattr"): member,
    ("__builtin__", "getattr"): member,  # protocol 2
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): arguments,
    ("pathlib", "PurePosixPath"): arguments,
}


def read_metadata(folder: Path | str) -> CheckpointIndex:
    """Read the index of a torch_dist folder. No class it names is imported, no data file is opened."""
    folder = Path(folder)
    path = folder / INDEX
    data = read_file(path, _INDEX_LIMIT)
    if not data:
        raise CheckpointError(f"{path}: the file is empty (0 bytes)")
    with explained(path):
        root = Pickle(data, _INDEX_TABLE).loaded()
        if type(root).__name__ not in ("Metadata", "MCoreMetadata"):
            raise Refused(f"it holds a {type(root).__name__}, not a Metadata")
        return _parse_index(folder, root)


def _parse_index(folder: Path, root: Inert) -> CheckpointIndex:
    places: dict[tuple[str, Any], StoredObject] = {}
    for where, info in _dict_of(root, "storage_data").items():
        offset = _typed_field(where, "offset", (tuple, type(None)))
        key = (_typed_field(where, "fqn", str), offset)
        if key in places:
            raise Refused(f"it gives two positions for {key[0]} at {offset}")
        places[key] = _parse_place(key[0], info)
    tensors: dict[str, DistTensor] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in _dict_of(root, "state_dict_metadata").items():
        if not isinstance(name, str):
            raise Refused(f"the name of a tensor is the {type(name).__name__} {name!r:.60}")
        kind = type(entry).__name__
        if kind == "BytesStorageMetadata":
            objects[name] = _take_place(places, name, None)
        elif kind == "TensorStorageMetadata":
            tensors[name] = _parse_tensor(places, name, entry)
        else:
            raise Refused(f"{name} is a {kind}, neither a tensor nor an object")
    if places:
        name, offset = next(iter(places))
        raise Refused(f"it gives a position for {name} at {offset}, but no tensor or object has this part")
    return CheckpointIndex(folder, tensors, objects)


def _parse_tensor(places: dict[tuple[str, Any], StoredObject], name: str, entry: Any) -> DistTensor:
    shape = _checked_shape(entry.field("size"), name)
    # Pickled as the tuple (dtype, layout, requires_grad, memory format, pinned).
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise Refused(f"{name} has the unknown type {dtype!r:.40}")
    chunks = []
    for chunk in entry.field("chunks") or ():
        offsets, sizes = (
            _checked_shape(_typed_field(chunk, key, tuple), name) for key in ("offsets", "sizes")
        )
        at = _take_place(places, name, offsets)
        chunks.append(TensorChunk(at.file, at.offset, at.length, offsets, sizes))
    return DistTensor(dtype, shape, tuple(chunks))


def _take_place(places: dict[tuple[str, Any], StoredObject], name: str, offset: Any) -> StoredObject:
    if (name, offset) not in places:
        raise Refused(f"it gives no position for {name}" + ("" if offset is None else f" at {offset}"))
    return places.pop((name, offset))


def _parse_place(name: str, info: Any) -> StoredObject:
    file = _typed_field(info, "relative_path", str)
    offset, length = _typed_field(info, "offset", int), _typed_field(info, "length", int)
    if not _is_below(file):
        raise Refused(f"it places {name} outside the folder, in {file!r:.120}")
    if min(offset, length) < 0 or max(offset, length) >= 1 << 63:
        raise Refused(f"it places {name} at offset {offset} with length {length}")
    if extra := info.field("transform_descriptors"):
        raise Refused(f"{name} is stored through {extra!r:.60}; only plain storage can be read")
    return StoredObject(file, offset, length)


@lru_cache(maxsize=1 << 16)
def _is_below(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and file.isprintable() and bool(path.name)


def _dict_of(root: Inert, name: str) -> dict[Any, Any]:
    value = root.field(name)
    if not isinstance(value, dict):
        raise Refused(f"its {name} is not a dict")
    return value


def _typed_field(instance: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    value = instance.field(name) if isinstance(instance, Inert) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Refused(f"{type(instance).__name__}.{name} is {value!r:.60}")
    return value


def _checked_shape(values: Any, name: str) -> tuple[int, ...]:
    short = isinstance(values, tuple) and len(values) <= MOST_AXES
    if not short or not all(type(v) is int and 0 <= v < 1 << 63 for v in values):
        raise Refused(f"{name} has the shape or offset {values!r:.80}")
    return values
