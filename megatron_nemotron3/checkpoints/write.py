"""Write the files of a torch_dist folder without torch: archives as torch.save writes them, and the index.

A .distcp file is a row of archives, one per chunk. Each is written in order, so that data can stream:

    archive = tensor_archive("bfloat16", (4096, 2688))
    write(archive.head); write(data); write(archive.tail(zlib.crc32(data)))

The CRC32 follows the data and is repeated in the archive's directory; both are in the tail. Nothing else
depends on values or names, so all experts share one archive. Data begins at a multiple of 64 bytes, and the
length of the archive is such a multiple, so that all archives in a file stay aligned.

What is not a tensor ("args", "iteration", "checkpoint_version") is stored twice. megatron-core 0.16 to 0.18
read only the file common.pt. 0.19 reads common.pt if it exists, warns that this will end, and otherwise reads
the object `common_state/shard_0_1` of the index. A strict load of 0.19 ignores that object, as does the
default strictness of every version. A folder for all versions therefore has both, with the same content:

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
from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_nemotron3.checkpoints.archive import ZIP64_LIMIT, ArchiveWriter
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, DistTensor, StoredObject
from megatron_nemotron3.checkpoints.read import STORAGES

_BYTEORDER, _VERSION = ("byteorder", b"little"), ("version", b"3\n")
#: Types that have a storage class; newer types are stored as bytes, with the type named in the pickle.
_CLASSES = {dtype: f"{name}Storage" for name, dtype in STORAGES.items()}
#: Key of the object that holds the common state, a list of one dict.
COMMON_OBJECT = "common_state/shard_0_1"
#: Content of metadata.json. 0.16 to 0.18 write two more fields, whose defaults are right.
CONFIG_TEXT = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
#: `Metadata.version` as torch writes it since 2.6; readers ignore it.
_METADATA_VERSION = "1.0.0"
_CALL = (pickle.TUPLE1, pickle.REDUCE)


@dataclass(frozen=True)
class Archive:
    """Archive of one tensor: `head`, `data_length` bytes of little-endian elements, `tail(crc32)`."""

    head: bytes
    data_length: int
    #: Bytes of the whole archive.
    length: int
    #: The tail, cut at the two places where the CRC32 goes.
    _tail_parts: tuple[bytes, bytes, bytes]

    def tail(self, crc32: int) -> bytes:
        """The bytes after the data, whose CRC32 is `crc32`."""
        crc = crc32.to_bytes(4, "little")
        first, middle, last = self._tail_parts
        return first + crc + middle + crc + last


@lru_cache(maxsize=4096)
def tensor_archive(dtype: str, sizes: tuple[int, ...]) -> Archive:
    """Return the archive of a contiguous tensor as torch.save writes it (file format 3, not compressed)."""
    if dtype not in ITEM_SIZE or any(size < 0 for size in sizes):
        raise ValueError(f"no tensor can be {dtype!r} of shape {list(sizes)}")
    length = math.prod(sizes) * ITEM_SIZE[dtype]
    records = ArchiveWriter()
    records.add("data.pkl", _tensor_pickle(dtype, sizes))
    records.add(*_BYTEORDER)
    records.open("data/0", length)
    head = records.take()
    records.at += length
    # Data descriptor: signature, CRC32, the size twice (8 bytes each if the header was zip64).
    width = 8 if length >= ZIP64_LIMIT else 4
    records.write(b"PK\7\10" + bytes(4) + length.to_bytes(width, "little") * 2)
    records.add(*_VERSION, end_aligned=True)
    body, directory, crc_at = records.take(), records.directory(), records.crc_in_directory("data/0")
    tail_parts = (body[:4], body[8:] + directory[:crc_at], directory[crc_at + 4 :])
    return Archive(head, length, records.at + len(directory), tail_parts)


def object_archive(value: Any) -> bytes:
    """Pickle plain data as torch.save does: None, bool, int, float, str; list, tuple, dict, Namespace.

    Equal values give equal bytes. torch.load reads them with `weights_only=False`, and with True if
    `argparse.Namespace` is declared safe, as Megatron declares it.
    """
    stream = io.BytesIO()
    pickler = _PlainPickler(stream, protocol=2)
    pickler.fast = True  # without a memo, the bytes do not depend on which objects are identical
    pickler.dump(value)
    records = ArchiveWriter()
    for name, data in (("data.pkl", stream.getvalue()), _BYTEORDER):
        records.add(name, data)
    records.add(*_VERSION, end_aligned=True)
    return records.take() + records.directory()


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if value is Namespace or type(value) is Namespace:
            return NotImplemented
        raise TypeError(f"{value!r:.60} is a {type(value).__name__}; only plain data is stored")


def _tensor_pickle(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """Pickle a call of torch._utils._rebuild_tensor_v2(storage, 0, sizes, stride, False, OrderedDict())."""
    if dtype in _CLASSES:
        version, storage, count = b"2", b"ctorch\n" + _CLASSES[dtype].encode() + b"\n", math.prod(sizes)
        ending = b""
    else:
        version, storage = b"3", b"ctorch.storage\nUntypedStorage\n"
        count, ending = math.prod(sizes) * ITEM_SIZE[dtype], b"ctorch\n" + dtype.encode() + b"\n"
    stride, step = [], 1
    for size in reversed(sizes):
        stride.append(step)
        step *= max(size, 1)
    return b"".join(
        (
            pickle.PROTO + b"\2ctorch._utils\n_rebuild_tensor_v" + version + b"\n(",
            b"("
            + _pickled_string("storage")
            + storage
            + _pickled_string("0")
            + _pickled_string("cpu")
            + _pickled_int(count),
            pickle.TUPLE + pickle.BINPERSID + _pickled_int(0),
            pickle.MARK + b"".join(map(_pickled_int, sizes)) + pickle.TUPLE,
            pickle.MARK + b"".join(map(_pickled_int, reversed(stride))) + pickle.TUPLE,
            pickle.NEWFALSE + b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE,
            ending + pickle.TUPLE + pickle.REDUCE + pickle.STOP,
        )
    )


def _pickled_string(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data


def _pickled_int(number: int) -> bytes:
    """Pickle a number of 0 or more."""
    if number < 1 << 8:
        return pickle.BININT1 + number.to_bytes(1, "little")
    if number < 1 << 31:
        return pickle.BININT + number.to_bytes(4, "little")
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return pickle.LONG1 + bytes([len(data)]) + data


def index_bytes(tensors: Mapping[str, DistTensor], objects: Mapping[str, StoredObject]) -> bytes:
    """Return the content of `.metadata`: a pickled torch.distributed.checkpoint Metadata.

    Equal arguments in equal order give equal bytes. Memory: about 200 bytes per chunk.
    """
    if both := tensors.keys() & objects.keys():
        raise ValueError(f"{min(both)!r} is both a tensor and an object")
    for name, tensor in tensors.items():
        if len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):
            raise ValueError(f"{name!r} has two chunks at the same offset")
    out = _Opcodes()
    with out.instance(_METADATA, "Metadata"):
        out.plain("state_dict_metadata")
        with out.mapping():
            for name, tensor in tensors.items():
                out.plain(name)
                _write_tensor_entry(out, tensor)
            for name in objects:
                out.plain(name)
                out.name(_METADATA, "BytesStorageMetadata")
                out.code(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
        out.plain("planner_data")  # path of every key in the dict that was saved; here the key itself
        with out.mapping():
            for name in (*tensors, *objects):
                out.plain(name, name)
                out.code(pickle.TUPLE1)
        out.plain("storage_data")
        with out.mapping():
            for name, tensor in tensors.items():
                for chunk in tensor.chunks:
                    _write_storage_entry(out, name, chunk, chunk.offsets)
            for name, place in objects.items():
                _write_storage_entry(out, name, place, None)
        out.plain("storage_meta", None, "version", _METADATA_VERSION)
    out.code(pickle.STOP)
    return bytes(out.data)


def _write_tensor_entry(out: _Opcodes, tensor: DistTensor) -> None:
    with out.instance(_METADATA, "TensorStorageMetadata"):
        out.plain("properties")
        out.properties(tensor.dtype)
        out.plain("size", tensor.shape, "chunks")
        out.code(pickle.EMPTY_LIST, pickle.MARK)
        for chunk in tensor.chunks:
            with out.instance(_METADATA, "ChunkStorageMetadata"):
                out.plain("offsets", chunk.offsets, "sizes", chunk.sizes)
        out.code(pickle.APPENDS)


def _write_storage_entry(
    out: _Opcodes, name: str, place: StoredObject, offsets: tuple[int, ...] | None
) -> None:
    with out.instance(_METADATA, "MetadataIndex"):
        out.plain("fqn", name, "index", None)
        if offsets is not None:
            out.plain("offset", offsets)
    with out.instance(_STORAGE, "_StorageInfo"):
        out.plain("relative_path", place.file, "offset", place.offset, "length", place.length)


class _Opcodes:
    """Builds a pickle. A value that was written before is referred to by its memo number."""

    def __init__(self) -> None:
        self.data = bytearray(pickle.PROTO + b"\2")
        self._known: dict[Hashable, bytes] = {}

    def code(self, *opcodes: bytes) -> None:
        for opcode in opcodes:
            self.data += opcode

    def plain(self, *values: str | int | tuple[int, ...] | None) -> None:
        """Append strings, numbers, shapes (as torch.Size) and None."""
        for value in values:
            if value is None:
                self.code(pickle.NONE)
            elif isinstance(value, int):
                self.code(_pickled_int(value))
            elif not self._recall(value):
                if isinstance(value, str):
                    self.code(_pickled_string(value))
                else:
                    self.name("torch", "Size")
                    self.code(pickle.MARK, *map(_pickled_int, value), pickle.TUPLE, *_CALL)
                self._remember(value)

    def name(self, module: str, name: str) -> None:
        if not self._recall((module, name)):
            self.code(pickle.GLOBAL, f"{module}\n{name}\n".encode())
            self._remember((module, name))

    def properties(self, dtype: str) -> None:
        """Append TensorProperties of a contiguous tensor: dtype, layout, gradient, memory format, pinned."""
        if self._recall(("properties", dtype)):
            return
        self.name(_METADATA, "TensorProperties")
        self.code(pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.MARK)
        self.name("torch", dtype)
        self.name("torch.serialization", "_get_layout")
        self.plain("torch.strided")
        self.code(*_CALL, pickle.NEWFALSE)
        self.name(_METADATA, "_MEM_FORMAT_ENCODING")
        self.plain(0)  # TORCH_CONTIGUOUS_FORMAT
        self.code(*_CALL, pickle.NEWFALSE, pickle.TUPLE, pickle.BUILD)
        self._remember(("properties", dtype))

    @contextmanager
    def mapping(self) -> Iterator[None]:
        """Append a dict; the block writes keys and values alternately."""
        self.code(pickle.EMPTY_DICT, pickle.MARK)
        yield
        self.code(pickle.SETITEMS)

    @contextmanager
    def instance(self, module: str, name: str) -> Iterator[None]:
        """Append an instance made without its constructor; the block writes attributes as in `mapping`."""
        self.name(module, name)
        self.code(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
        with self.mapping():
            yield
        self.code(pickle.BUILD)

    def _recall(self, key: Hashable) -> bool:
        if (get := self._known.get(key)) is None:
            return False
        self.data += get
        return True

    def _remember(self, key: Hashable) -> None:
        number = len(self._known)
        if number < 256:
            self.code(pickle.BINPUT, bytes([number]))
            self._known[key] = pickle.BINGET + bytes([number])
        else:
            wide = number.to_bytes(4, "little")
            self.code(pickle.LONG_BINPUT, wide)
            self._known[key] = pickle.LONG_BINGET + wide
