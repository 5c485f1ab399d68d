"""Write the files of a torch_dist folder: archives as torch.save writes them, the index, and the state.

A .distcp file is a row of archives, one per chunk of a tensor and one per object. What is not a tensor
("args", "iteration", "checkpoint_version") is stored twice. megatron-core 0.16 to 0.18 read only the file
common.pt. 0.19 reads common.pt if it exists, warns that this will end, and otherwise reads the object
`common_state/shard_0_1` of the index. A strict load of 0.19 ignores that object, as does the default
strictness of every version. A folder for all versions therefore has both, with the same content:

    common.pt                        object_archive(state)
    object common_state/shard_0_1    object_archive([state])
    .metadata                        index_bytes(tensors, objects)
    metadata.json                    CONFIG_TEXT, written last

(With `--dist-ckpt-strictness raise_all`, 0.16 to 0.18 refuse the object as unexpected.)
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, DistTensor, StoredObject
from megatron_nemotron3.checkpoints.read import STORAGES

#: Key of the object that holds the common state, a list of one dict.
COMMON_OBJECT = "common_state/shard_0_1"
#: Content of metadata.json. 0.16 to 0.18 write two more fields, whose defaults are right.
CONFIG_TEXT = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
#: Types that have a storage class; newer types are stored as bytes, with the type named in the pickle.
_CLASSES = {dtype: getattr(torch, f"{name}Storage") for name, dtype in STORAGES.items()}


class Writable(Protocol):
    """What an archive is written to, in order."""

    def write(self, data: Any, /) -> int: ...


class _Sequential:
    """A file without a position, of which zipfile writes an archive as if it began there."""

    def __init__(self, out: Writable) -> None:
        self._out = out

    def write(self, data: Any, /) -> int:
        return self._out.write(data)

    def flush(self) -> None:
        pass

    close = flush


def object_archive(value: Any) -> bytes:
    """Plain data as torch.save writes it: None, bool, int, float, str; list, tuple, dict, Namespace."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_tensor(out: Writable, dtype: str, shape: tuple[int, ...], bands: Iterable[memoryview]) -> None:
    """Write the archive of a contiguous tensor as torch.save does (file format 3).

    Args:
        bands: its elements in order, as bytes.
    """
    with zipfile.ZipFile(_Sequential(out), "w") as archive:
        archive.writestr(_record("data.pkl"), _tensor_pickle(dtype, shape))
        archive.writestr(_record("byteorder"), b"little")
        data = _record("data/0")
        data.file_size = math.prod(shape) * ITEM_SIZE[dtype]  # decides between 32 and 64 bits
        with archive.open(data, "w") as file:
            for band in bands:
                file.write(band)
        archive.writestr(_record("version"), b"3\n")


@lru_cache(maxsize=1024)
def overhead(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's archive without its elements; from 2 GiB on, up to 200 bytes too few."""
    stream = io.BytesIO()
    write_tensor(stream, dtype, shape, ())
    return len(stream.getvalue())


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


def index_bytes(tensors: Mapping[str, DistTensor], objects: Mapping[str, StoredObject]) -> bytes:
    """Return the content of `.metadata`: a pickled torch.distributed.checkpoint Metadata."""
    if both := tensors.keys() & objects.keys():
        raise ValueError(f"{min(both)!r} is both a tensor and an object")
    entries: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            at = dcp.MetadataIndex(name, torch.Size(chunk.offsets))
            if at in places:
                raise ValueError(f"{name!r} has two chunks at the same offset")
            places[at] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        properties = dcp.TensorProperties(getattr(torch, tensor.dtype))
        entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for name, place in objects.items():
        entries[name] = dcp.BytesStorageMetadata()
        places[dcp.MetadataIndex(name)] = _StorageInfo(place.file, place.offset, place.length)
    # The path of every key in the dict that was saved; here the key itself.
    planned = {name: (name,) for name in entries}
    return pickle.dumps(dcp.Metadata(entries, planned, places, version=CURRENT_DCP_VERSION))
