"""Hugging Face -> Megatron: the plan of a torch_dist folder, file by file.

OUT/latest_checkpointed_iteration.txt    "release": Megatron starts from it at iteration 0, optimizer new
OUT/release/__0_N.distcp                 chunks one behind another; one for each expert
OUT/release/common.pt, .metadata, metadata.json
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_nemotron3.checkpoint.folders import RELEASE, TRACKER
from megatron_nemotron3.checkpoint.metadata import COMMON, INDEX, Chunk, StoredObject, StoredTensor
from megatron_nemotron3.checkpoint.structure import CONFIG
from megatron_nemotron3.checkpoint.write import (
    COMMON_OBJECT,
    CONFIG_TEXT,
    index_bytes,
    object_archive,
    tensor_archive,
)
from megatron_nemotron3.convert.extra_state import extra_state_archive, extra_state_keys
from megatron_nemotron3.convert.megatron_args import args_of, common_state
from megatron_nemotron3.convert.plan import Slices, band, extent, whole
from megatron_nemotron3.convert.stored import SourceTensor
from megatron_nemotron3.convert.streams import FilePlan, Part
from megatron_nemotron3.convert.views import Converted
from megatron_nemotron3.models import Nemotron3Config

#: A file is closed when it has as many bytes.
FILE_BYTES = 5 * 10**9
#: Parts of a large column-parallel tensor, so that a rank reads its own share and little more.
_PARTS = 8
_LARGE = 16 << 20


@dataclass
class Folder:
    """A torch_dist folder that is being planned."""

    limit: int
    files: list[FilePlan] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    _parts: list[Part] = field(default_factory=list)
    _length: int = 0

    def add(self, name: str, tensor: SourceTensor, slices: list[Slices]) -> None:
        """A tensor in chunks."""
        chunks = []
        for one in slices:
            archive = tensor_archive(tensor.dtype, extent(one))
            part = Part(
                archive.head,
                name,
                one,
                tensor.dtype,
                archive.tail,
                archive.length - len(archive.head) - archive.data_length,
            )
            place = self._put(part)
            starts = tuple(start for start, _ in one)
            chunks.append(Chunk(place.file, place.offset, place.length, starts, extent(one)))
        self.tensors[name] = StoredTensor(tensor.dtype, tensor.shape, tuple(chunks))

    def add_object(self, key: str, archive: bytes) -> None:
        """A pickled object."""
        self.objects[key] = self._put(Part(head=archive))

    def close(self) -> None:
        """End the file that is open."""
        if self._parts:
            self.files.append(FilePlan(f"{RELEASE}/{self._name()}", self._parts))
            self._parts, self._length = [], 0

    def _put(self, part: Part) -> StoredObject:
        if self._parts and self._length + part.length > self.limit:
            self.close()
        place = StoredObject(self._name(), self._length, part.length)
        self._parts.append(part)
        self._length += part.length
        return place

    def _name(self) -> str:
        return f"__0_{len(self.files)}.distcp"


def plan(
    view: Converted, config: Nemotron3Config, *, padded_vocab_size: int, dtype: str, limit: int = FILE_BYTES
) -> tuple[list[FilePlan], dict[str, bytes]]:
    """The files of the folder with these weights, and the small ones in the order they are written.

    Args:
        view: Megatron's tensors.
        dtype: of the weights, for the stored arguments.
        limit: bytes of a file, unless a single chunk is longer.
    """
    folder = Folder(limit)
    for name, tensor in view.tensors.items():
        folder.add(name, tensor, list(_chunks(view, name, tensor)))
    for key in extra_state_keys(config):
        folder.add_object(key, extra_state_archive())
    state = common_state(args_of(config, padded_vocab_size=padded_vocab_size, dtype=dtype))
    folder.add_object(COMMON_OBJECT, object_archive([state]))
    folder.close()
    small = {
        f"{RELEASE}/{COMMON}": object_archive(state),
        f"{RELEASE}/{INDEX}": index_bytes(folder.tensors, folder.objects),
        f"{RELEASE}/{CONFIG}": CONFIG_TEXT.encode(),
        TRACKER: RELEASE.encode(),
    }
    return folder.files, small


def _chunks(view: Converted, name: str, tensor: SourceTensor) -> Iterator[Slices]:
    row, shape = view.link(name).row, tensor.shape
    if row.routed and len(shape) == 3:
        for expert in range(shape[0]):
            yield band(shape, expert, expert + 1)
    elif row.tp in ("column", "parts") and tensor.nbytes > _LARGE and shape[0] % _PARTS == 0:
        rows = shape[0] // _PARTS
        for part in range(_PARTS):
            yield band(shape, part * rows, (part + 1) * rows)
    else:
        yield whole(shape)


def padded(vocab_size: int, divisible_by: int) -> int:
    """Rows of Megatron's embedding (`--make-vocab-size-divisible-by` times TP)."""
    return -(-vocab_size // divisible_by) * divisible_by
