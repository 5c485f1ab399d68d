"""Write the files of a torch_dist folder: archives as torch.save writes them, the index, and the state.

What is not a tensor is stored twice. megatron-core 0.16 to 0.18 read only common.pt; 0.19 reads it if it
exists, warns that this will end, and otherwise reads the object `COMMON_OBJECT`, which older versions ignore
unless `--dist-ckpt-strictness raise_all` is given.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch

from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, StoredObject, TensorChunk
from megatron_nemotron3.checkpoints.read import STORAGES

#: Key of the object that holds the common state, a list of one dict.
COMMON_OBJECT = "common_state/shard_0_1"
#: Content of metadata.json. 0.16 to 0.18 write two more fields, whose defaults are right.
CONFIG_TEXT = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
#: Types that have a storage class; newer types are stored as bytes, with the type named in the pickle.
_CLASSES = {dtype: getattr(torch, f"{name}Storage") for name, dtype in STORAGES.items()}
#: Largest tensor, in bytes, whose archive is written at once: quicker.
_SMALL = 1 << 20
#: Stands for the CRC32 of elements that are not known yet.
_UNKNOWN = 0x9E3779B9
#: Bit of a record whose CRC32 and sizes stand behind it, and the signature of these.
_SIZES_BEHIND, _BEHIND = 0x08, b"PK\7\x08"


class Writable(Protocol):
    """What an archive is written to, in order."""

    def write(self, data: Any, /) -> int: ...

    @property
    def crc32(self) -> int:
        """Of all bytes that were written."""


def object_archive(value: Any) -> bytes:
    """Plain data as torch.save writes it: None, bool, int, float, str; list, tuple, dict, Namespace."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_tensor(out: Writable, dtype: str, shape: tuple[int, ...], bands: Iterable[memoryview]) -> None:
    """Write the archive of a contiguous tensor, whose elements are `bands`, as torch.save does (format 3)."""
    head, tail = _around(dtype, shape)
    if (length := math.prod(shape) * ITEM_SIZE[dtype]) > _SMALL:
        out.write(head)
        before = out.crc32
        for band in bands:
            out.write(band)
        out.write(_stored(_crc32_of_last(length, before, out.crc32)).join(tail))
        return
    data = b"".join(bands)
    out.write(b"".join((head, data, _stored(zlib.crc32(data)).join(tail))))


def _crc32_of_last(length: int, before: int, after: int) -> int:
    """The CRC32 of the last `length` bytes of a file, from that of the bytes before them and that of all."""
    # It is a polynomial over GF(2), its highest bit the coefficient of x^0: a byte that follows multiplies it
    # by x^8, and adds its own.
    power = 1 << 23
    while length:
        if length & 1:
            before = _product(before, power)
        power = _product(power, power)
        length >>= 1
    return before ^ after


def _product(one: int, other: int) -> int:
    """The product of two polynomials, modulo that of CRC32."""
    result = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            result ^= other
        other = other >> 1 ^ (0xEDB88320 if other & 1 else 0)
    return result


def overhead(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's archive without its elements."""
    head, tail = _around(dtype, shape)
    return len(head) + len(_stored(0).join(tail))


def _stored(crc: int) -> bytes:
    return crc.to_bytes(4, "little")


class _Frame:
    """A file with an archive, but without the elements of its tensor, of which only the length is written.

    It has no position, so zipfile writes the archive as if the file began there.
    """

    def __init__(self) -> None:
        self.pieces = [b""]

    def write(self, data: bytes | int) -> int:
        if isinstance(data, int):
            self.pieces.append(b"")
            return data
        self.pieces[-1] += data
        return len(data)

    def flush(self) -> None: ...


@lru_cache(maxsize=4096)
def _around(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, tuple[bytes, ...]]:
    """What stands before the elements of a tensor, and behind them, cut where their CRC32 is."""
    frame: Any = _Frame()
    with zipfile.ZipFile(frame, "w") as archive:
        archive.writestr(_record("data.pkl"), _tensor_pickle(dtype, shape))
        archive.writestr(_record("byteorder"), b"little")
        _add_elements(archive, math.prod(shape) * ITEM_SIZE[dtype])
        archive.writestr(_record("version"), b"3\n")
    head, tail = frame.pieces
    cut = tuple(tail.split(_stored(_UNKNOWN)))
    assert len(cut) == 3
    return head, cut


def _add_elements(archive: Any, length: int) -> None:
    """Add the record of the elements as `ZipFile.open` does."""
    record, zip64 = _record("data/0"), length * 1.05 > (1 << 31) - 1
    record.flag_bits, record.external_attr = _SIZES_BEHIND, 0o600 << 16
    record.header_offset = archive.fp.tell()
    archive.fp.write(record.FileHeader(zip64))
    archive.fp.write(length)
    record.CRC, record.compress_size, record.file_size = _UNKNOWN, length, length
    archive.fp.write(struct.pack("<4sLQQ" if zip64 else "<4sLLL", _BEHIND, _UNKNOWN, length, length))
    archive.filelist.append(record)
    archive.start_dir = archive.fp.tell()


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
    from torch.distributed.checkpoint import metadata as dcp  # an import of seconds
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

    entries: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    size = lru_cache(maxsize=4096)(torch.Size)
    for key, part in parts:
        starts = part.offsets if isinstance(part, TensorChunk) else None
        at = dcp.MetadataIndex(key, None if starts is None else size(starts))
        if at in places:
            raise ValueError(f"{key!r} has two parts at {starts}")
        places[at] = _StorageInfo(part.file, part.offset, part.length)
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
    return pickle.dumps(dcp.Metadata(entries, planned, places, version=CURRENT_DCP_VERSION))
