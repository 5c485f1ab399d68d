"""Write the index of a torch_dist folder, without torch, and say what else Megatron wants beside it.

What is not a tensor ("args", "iteration", "checkpoint_version") has two homes. megatron-core 0.16 to 0.18
read the file common.pt only. 0.19 reads common.pt if there is one, says that this will end, and else reads an
object `common_state/shard_0_1` in the index. A strict load of 0.19 overlooks that object, and so does the
default strictness of every version. So a folder for all of them has both, with the same content:

    common.pt                        pack.object_archive(state)
    object common_state/shard_0_1    pack.object_archive([state])
    .metadata                        index_bytes(tensors, objects)
    metadata.json                    CONFIG_TEXT, written last

(With `--dist-ckpt-strictness raise_all`, 0.16 to 0.18 refuse the object as unexpected.)
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

from megatron_nemotron3.checkpoint.metadata import StoredObject, StoredTensor

#: Key of the object that holds the common state, a list of one dict.
COMMON_OBJECT = "common_state/shard_0_1"
#: All of metadata.json. 0.16 to 0.18 have two fields more, with defaults that are right.
CONFIG_TEXT = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
#: Of torch's writer, in `Metadata.version` since torch 2.6; readers do not look at it.
_VERSION = "1.0.0"
_CALL = (pickle.TUPLE1, pickle.REDUCE)


def index_bytes(tensors: Mapping[str, StoredTensor], objects: Mapping[str, StoredObject]) -> bytes:
    """All of `.metadata`: a pickled torch.distributed.checkpoint Metadata.

    Equal arguments in equal order give equal bytes. Memory: about 200 bytes for each chunk.

    Args:
        tensors: key -> where its chunks are, each with the length of its whole archive.
        objects: key -> where its archive is.

    Raises:
        ValueError: a key is both a tensor and an object, or a tensor has two chunks at one offset.
    """
    if both := tensors.keys() & objects.keys():
        raise ValueError(f"{min(both)!r} is both a tensor and an object")
    for name, tensor in tensors.items():
        if len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):
            raise ValueError(f"{name!r} has two chunks at the same offset")
    out = _Opcodes()
    with out.instance(_METADATA, "Metadata"):
        out.string("state_dict_metadata")
        with out.mapping():
            for name, tensor in tensors.items():
                out.string(name)
                _tensor(out, tensor)
            for name in objects:
                out.string(name)
                out.name(_METADATA, "BytesStorageMetadata")
                out.code(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
        out.string("planner_data")  # every key's path in the dict that was saved: the key
        with out.mapping():
            for name in (*tensors, *objects):
                out.string(name)
                out.string(name)
                out.code(pickle.TUPLE1)
        out.string("storage_data")
        with out.mapping():
            for name, tensor in tensors.items():
                for chunk in tensor.chunks:
                    _place(out, name, chunk, chunk.offsets)
            for name, place in objects.items():
                _place(out, name, place, None)
        out.string("storage_meta")
        out.code(pickle.NONE)
        out.string("version")
        out.string(_VERSION)
    out.code(pickle.STOP)
    return bytes(out.data)


def _tensor(out: _Opcodes, tensor: StoredTensor) -> None:
    with out.instance(_METADATA, "TensorStorageMetadata"):
        out.string("properties")
        out.properties(tensor.dtype)
        out.string("size")
        out.size(tensor.shape)
        out.string("chunks")
        out.code(pickle.EMPTY_LIST, pickle.MARK)
        for chunk in tensor.chunks:
            with out.instance(_METADATA, "ChunkStorageMetadata"):
                out.string("offsets")
                out.size(chunk.offsets)
                out.string("sizes")
                out.size(chunk.sizes)
        out.code(pickle.APPENDS)


def _place(out: _Opcodes, name: str, place: StoredObject, offsets: tuple[int, ...] | None) -> None:
    with out.instance(_METADATA, "MetadataIndex"):
        out.string("fqn")
        out.string(name)
        out.string("index")
        out.code(pickle.NONE)
        if offsets is not None:
            out.string("offset")
            out.size(offsets)
    with out.instance(_STORAGE, "_StorageInfo"):
        out.string("relative_path")
        out.string(place.file)
        out.string("offset")
        out.number(place.offset)
        out.string("length")
        out.number(place.length)


class _Opcodes:
    """A pickle in the making. What was written once is referred to when it comes again."""

    def __init__(self) -> None:
        self.data = bytearray(pickle.PROTO + b"\2")
        self._known: dict[Hashable, bytes] = {}

    def code(self, *opcodes: bytes) -> None:
        """Opcodes as they are."""
        for opcode in opcodes:
            self.data += opcode

    def string(self, text: str) -> None:
        if not self._again(text):
            data = text.encode()
            self.code(pickle.BINUNICODE, len(data).to_bytes(4, "little"), data)
            self._remember(text)

    def number(self, number: int) -> None:
        """A number that is not negative."""
        if number < 1 << 8:
            self.code(pickle.BININT1, number.to_bytes(1, "little"))
        elif number < 1 << 31:
            self.code(pickle.BININT, number.to_bytes(4, "little"))
        else:
            data = number.to_bytes(number.bit_length() // 8 + 1, "little")
            self.code(pickle.LONG1, bytes([len(data)]), data)

    def name(self, module: str, name: str) -> None:
        """A class, function or type."""
        if not self._again((module, name)):
            self.code(pickle.GLOBAL, f"{module}\n{name}\n".encode())
            self._remember((module, name))

    def size(self, numbers: tuple[int, ...]) -> None:
        """A torch.Size."""
        if not self._again(numbers):
            self.name("torch", "Size")
            self.code(pickle.MARK)
            for number in numbers:
                self.number(number)
            self.code(pickle.TUPLE, *_CALL)
            self._remember(numbers)

    def properties(self, dtype: str) -> None:
        """TensorProperties of a contiguous tensor: dtype, layout, gradient, memory format, pinned."""
        if self._again(("properties", dtype)):
            return
        self.name(_METADATA, "TensorProperties")
        self.code(pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.MARK)
        self.name("torch", dtype)
        self.name("torch.serialization", "_get_layout")
        self.string("torch.strided")
        self.code(*_CALL, pickle.NEWFALSE)
        self.name(_METADATA, "_MEM_FORMAT_ENCODING")
        self.number(0)  # TORCH_CONTIGUOUS_FORMAT
        self.code(*_CALL, pickle.NEWFALSE, pickle.TUPLE, pickle.BUILD)
        self._remember(("properties", dtype))

    @contextmanager
    def mapping(self) -> Iterator[None]:
        """A dict; keys and values in turn are written inside."""
        self.code(pickle.EMPTY_DICT, pickle.MARK)
        yield
        self.code(pickle.SETITEMS)

    @contextmanager
    def instance(self, module: str, name: str) -> Iterator[None]:
        """An instance, made without its constructor; names and values of attributes are written inside."""
        self.name(module, name)
        self.code(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
        with self.mapping():
            yield
        self.code(pickle.BUILD)

    def _again(self, key: Hashable) -> bool:
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
