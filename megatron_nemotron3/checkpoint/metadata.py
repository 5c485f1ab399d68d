"""What a torch_dist checkpoint folder holds, read without Megatron and without torch.

FOLDER/.metadata       pickle of torch.distributed.checkpoint's Metadata: the index
FOLDER/__0_0.distcp    chunks one behind another, each a torch.save archive
FOLDER/metadata.json   {"sharded_backend": "torch_dist", …}, written last
FOLDER/common.pt       what is not a tensor, up to megatron-core 0.18; later an object `common_state/…`

Tensors are stored with global shapes, so nothing in here depends on the layout that wrote them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_nemotron3.checkpoint.unpickle import Inert, Refused, inert, loads

INDEX = ".metadata"
COMMON = "common.pt"

#: Bytes per element; sub-byte types are packed and count whole bytes.
ITEM_SIZE = {
    **dict.fromkeys(["float64", "int64", "uint64", "complex64"], 8),
    **dict.fromkeys(["float32", "int32", "uint32"], 4),
    **dict.fromkeys(["float16", "bfloat16", "int16", "uint16"], 2),
    **dict.fromkeys(["int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"], 1),
    **dict.fromkeys(["float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"], 1),
    "complex128": 16,
}


#: Of a tensor; torch's own limit.
MOST_AXES = 64


class CheckpointError(ValueError):
    """A file of a checkpoint is damaged; the message begins with its path."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A pickled object: bytes [offset, offset + length) of `file`."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk(StoredObject):
    """The part of a tensor that begins at `offsets` and has shape `sizes`; a torch.save archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: torch's dtype name without "torch.", global shape, chunks in file order."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class CheckpointIndex:
    """The index of one checkpoint folder."""

    folder: Path
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]

    @property
    def files(self) -> dict[str, int]:
        """File name -> least size in bytes that holds everything the index places in it."""
        ends: dict[str, int] = {}
        for item in self.items():
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        return dict(sorted(ends.items()))

    def items(self) -> list[StoredObject]:
        """Every chunk and every object."""
        return [*(c for t in self.tensors.values() for c in t.chunks), *self.objects.values()]

    @property
    def common_state(self) -> StoredObject | None:
        """Where megatron-core from 0.19 on keeps arguments and iteration; None: in common.pt."""
        found = (v for k, v in self.objects.items() if k.startswith("common_state/"))
        return next(found, None)


def _plain(*args: Any) -> tuple[Any, ...]:
    return args


def _size(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


_METADATA = "torch.distributed.checkpoint.metadata"
#: What an index names. Instances become `Inert`, so does whatever cached save plans hold.
_TABLE: dict[tuple[str, str], Any] = {
    **{("torch", dtype): dtype for dtype in ITEM_SIZE},
    **{
        (_METADATA, name): inert(name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): inert("_StorageInfo"),
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _plain,
    ("builtins", "getattr"): _plain,  # how Python 3.11 pickles a member of an enumeration; nothing is got
    ("__builtin__", "getattr"): _plain,  # the same in protocol 2
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _plain,
    ("pathlib", "PurePosixPath"): _plain,
    ("io", "BytesIO"): inert("BytesIO"),
}
#: Saves that cache their plan keep it in the index, as instances of these packages.
_STUBS = ("megatron.", "nvidia_resiliency_ext.", "torch.distributed.")


def read_metadata(folder: Path | str) -> CheckpointIndex:
    """The index of a torch_dist folder; no class it names is imported, no data file is opened.

    Raises:
        CheckpointError: `.metadata` is missing, damaged, or names something an index does not need.
    """
    folder = Path(folder)
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    if not data:
        raise CheckpointError(f"{path}: the file is empty (0 bytes)")
    try:
        root = loads(data, _TABLE, stubs=_STUBS)
        if type(root).__name__ not in ("Metadata", "MCoreMetadata"):
            raise Refused(f"it holds a {type(root).__name__}, not a Metadata")
        return _index(folder, root)
    except Refused as problem:
        raise CheckpointError(f"{path}: {problem}") from None


def _index(folder: Path, root: Inert) -> CheckpointIndex:
    places: dict[tuple[str, Any], StoredObject] = {}
    for where, info in _dict(root.field("storage_data"), "storage_data").items():
        offset = _field(where, "offset", (tuple, type(None)))
        key = (_field(where, "fqn", str), offset)
        if key in places:
            raise Refused(f"it places {key[0]} at {offset} twice")
        places[key] = _place(key[0], info)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in _dict(root.field("state_dict_metadata"), "state_dict_metadata").items():
        if not isinstance(name, str):
            raise Refused(f"a tensor's name is the {type(name).__name__} {name!r:.60}")
        kind = type(entry).__name__
        if kind == "BytesStorageMetadata":
            objects[name] = _located(places, name, None)
        elif kind == "TensorStorageMetadata":
            tensors[name] = _tensor(places, name, entry)
        else:
            raise Refused(f"{name} is a {kind}, neither a tensor nor an object")
    if places:
        name, offset = next(iter(places))
        raise Refused(f"it places {name} at {offset}, which no tensor or object has")
    return CheckpointIndex(folder, tensors, objects)


def _tensor(places: dict[tuple[str, Any], StoredObject], name: str, entry: Any) -> StoredTensor:
    shape = _shape(entry.field("size"), name)
    # Pickled as the tuple (dtype, layout, requires_grad, memory format, pinned).
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise Refused(f"{name} has the unknown type {dtype!r:.40}")
    chunks = []
    for chunk in entry.field("chunks") or ():
        offsets, sizes = (_shape(_field(chunk, key, tuple), name) for key in ("offsets", "sizes"))
        at = _located(places, name, offsets)
        chunks.append(Chunk(at.file, at.offset, at.length, offsets, sizes))
    return StoredTensor(dtype, shape, tuple(chunks))


def _located(places: dict[tuple[str, Any], StoredObject], name: str, offset: Any) -> StoredObject:
    if (name, offset) not in places:
        raise Refused(f"it gives no place for {name}" + ("" if offset is None else f" at {offset}"))
    return places.pop((name, offset))


def _place(name: str, info: Any) -> StoredObject:
    file = _field(info, "relative_path", str)
    offset, length = _field(info, "offset", int), _field(info, "length", int)
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\0" in file or not path.name:
        raise Refused(f"it places {name} outside the folder, in {file!r:.120}")
    if min(offset, length) < 0 or max(offset, length) >= 1 << 63:
        raise Refused(f"it places {name} at offset {offset} with length {length}")
    if extra := info.field("transform_descriptors"):
        raise Refused(f"{name} is stored through {extra!r:.60}; only plain storage can be read")
    return StoredObject(file, offset, length)


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise Refused(f"its {what} is no dict")
    return value


def _field(instance: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    value = instance.field(name) if isinstance(instance, Inert) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Refused(f"{type(instance).__name__}.{name} is {value!r:.60}")
    return value


def _shape(values: Any, name: str) -> tuple[int, ...]:
    if (
        not isinstance(values, tuple)
        or len(values) > MOST_AXES
        or not all(type(v) is int and 0 <= v < 1 << 63 for v in values)
    ):
        raise Refused(f"{name} has the shape or offset {values!r:.80}")
    return values
