"""Write the files of a torch_dist folder: archives as torch.save writes them, the index, and the state.

What is not a tensor is stored twice. megatron-core 0.16 to 0.18 read only common.pt; 0.19 reads it if it
exists, warns that this will end, and otherwise reads the object `COMMON_OBJECT`, which older versions ignore
unless `--dist-ckpt-strictness raise_all` is given.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, StoredObject, TensorChunk
from megatron_nemotron3.checkpoints.read import STORAGES, HeldBytes, records

#: Key of the object that holds the common state, a list of one dict.
COMMON_OBJECT = "common_state/shard_0_1"
#: Content of metadata.json. 0.16 to 0.18 write two more fields, whose defaults are right.
CONFIG_TEXT = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
#: Types that have a storage class; newer types are stored as bytes, with the type named in the pickle.
_CLASSES = {dtype: getattr(torch, f"{name}Storage") for name, dtype in STORAGES.items()}
#: Largest tensor, in bytes, whose archive is a copy of that of another with its own elements: quicker.
_SMALL = 1 << 20


class Writable(Protocol):
    """What an archive is written to, in order."""

    def write(self, data: Any, /) -> int: ...


def object_archive(value: Any) -> bytes:
    """Plain data as torch.save writes it: None, bool, int, float, str; list, tuple, dict, Namespace."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_tensor(out: Writable, dtype: str, shape: tuple[int, ...], bands: Iterable[memoryview]) -> None:
    """Write the archive of a contiguous tensor, whose elements are `bands`, as torch.save does (format 3)."""
    if math.prod(shape) * ITEM_SIZE[dtype] > _SMALL:
        _write_archive(out, dtype, shape, bands)
        return
    head, tail = _around(dtype, shape)
    data = b"".join(bands)
    out.write(b"".join((head, data, _crc32(data).join(tail))))


def overhead(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's archive without its elements; from 2 GiB on, up to 200 bytes too few."""
    head, tail = _around(dtype, shape)
    return len(head) + len(_crc32(b"").join(tail))


def _crc32(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


@lru_cache(maxsize=4096)
def _around(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, tuple[bytes, ...]]:
    """What stands before the elements of a small tensor, and behind them, cut where their CRC32 is."""
    length = min(math.prod(shape) * ITEM_SIZE[dtype], _SMALL)
    stream, data = io.BytesIO(), b"\x5a" * length
    _write_archive(stream, dtype, shape, [memoryview(data)])
    whole = stream.getvalue()
    place = StoredObject("", 0, len(whole))
    begin = next(one.offset for one in records(HeldBytes(whole), place) if one.name == "data/0")
    tail = tuple(whole[begin + length :].split(_crc32(data))) if length else (whole[begin:],)
    assert whole[begin : begin + length] == data and len(tail) == (3 if length else 1)
    return whole[:begin], tail


def _write_archive(out: Writable, dtype: str, shape: tuple[int, ...], bands: Iterable[memoryview]) -> None:
    # To a file that has no position zipfile writes an archive as if it began there.
    file: Any = SimpleNamespace(write=out.write, flush=lambda: None)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_record("data.pkl"), _tensor_pickle(dtype, shape))
        archive.writestr(_record("byteorder"), b"little")
        data = _record("data/0")
        data.file_size = math.prod(shape) * ITEM_SIZE[dtype]  # decides between 32 and 64 bits
        with archive.open(data, "w") as record:
            for band in bands:
                record.write(band)
        archive.writestr(_record("version"), b"3\n")


def _record(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"archive/{name}")


class _StorageName:
    """Stands for the storage of a tensor in its pickle."""

    def __init__(self, kind: Any, count: int) -> None:
        self.pid = ("storage", kind, "0", "cpu", count)


class _Tensor:
    """Pickled as a contiguous tensor whose storage is stored elsewhere."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> Any:
        shape, count = self.shape, math.prod(self.shape)
        stride = tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))
        rest: tuple[Any, ...] = (0, shape, stride, False, OrderedDict())
        if (kind := _CLASSES.get(self.dtype)) is not None:
            return torch._utils._rebuild_tensor_v2, (_StorageName(kind, count), *rest)
        storage = _StorageName(torch.UntypedStorage, count * ITEM_SIZE[self.dtype])
        return torch._utils._rebuild_tensor_v3, (storage, *rest, getattr(torch, self.dtype))


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, _StorageName) else None


@lru_cache(maxsize=1024)
def _tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Tensor(dtype, shape))
    return stream.getvalue()


def index_bytes(
    parts: Iterable[tuple[str, StoredObject]], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> bytes:
    """Return the content of `.metadata`.

    Args:
        parts: (name, place) of each object and each chunk of a tensor.
        tensors: dtype and global shape of each tensor.
    """
    from torch.distributed.checkpoint import filesystem  # an import of seconds
    from torch.distributed.checkpoint import metadata as dcp

    entries: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, filesystem._StorageInfo] = {}
    size = lru_cache(maxsize=4096)(torch.Size)
    for key, part in parts:
        starts = part.offsets if isinstance(part, TensorChunk) else None
        at = dcp.MetadataIndex(key, None if starts is None else size(starts))
        if at in places:
            raise ValueError(f"{key!r} has two parts at {starts}")
        places[at] = filesystem._StorageInfo(part.file, part.offset, part.length)
        if not isinstance(part, TensorChunk):
            entries[key] = dcp.BytesStorageMetadata()
            continue
        if key not in entries:
            dtype, shape = tensors[key]
            properties = dcp.TensorProperties(getattr(torch, dtype))
            entries[key] = dcp.TensorStorageMetadata(properties, size(shape), [])
        entries[key].chunks.append(dcp.ChunkStorageMetadata(size(part.offsets), size(part.sizes)))
    # The path of every key in the dict that was saved; here the key itself.
    planned = {name: (name,) for name in entries}
    metadata = dcp.Metadata(entries, planned, places)
    if hasattr(filesystem, "CURRENT_DCP_VERSION"):  # since torch 2.9
        metadata.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(metadata)
