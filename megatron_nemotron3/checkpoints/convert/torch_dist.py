"""Tensor sources for folders in torch's distributed format: torch_dist, and torch_dcp or fsdp_dtensor.

Tensors in torch's own format (torch_dcp, fsdp_dtensor) are whole parameters, rank after rank: of Mamba's
in_proj under tensor parallelism [z_0 | x_0 | … | z_1 | x_1 | …]. Megatron-FSDP does not reorder them, so such
a checkpoint loads only at the TP that wrote it. `reorder_mamba` puts the rows in order.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import transforms
from megatron_nemotron3.checkpoints.convert.keys import NameLookup, non_weight_kind
from megatron_nemotron3.checkpoints.convert.plan import CopyPlan
from megatron_nemotron3.checkpoints.convert.sources import Block, FileSource, Location, SourceTensor
from megatron_nemotron3.checkpoints.metadata import (
    ITEM_SIZE,
    CheckpointError,
    CheckpointIndex,
    TensorChunk,
    explained,
)
from megatron_nemotron3.checkpoints.read import ChunkLayouts, MappedFiles
from megatron_nemotron3.checkpoints.state import stored_arguments
from megatron_nemotron3.checkpoints.structure import Verdict, complete_index
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import symbol_sizes


def open_torch_dist(folder: Path, verdict: Verdict | None = None) -> tuple[FileSource, CheckpointIndex]:
    """Open every tensor of a torch_dist folder, including optimizer state; also return its index."""
    index, files = complete_index(folder, verdict)
    opened = MappedFiles()
    return FileSource(folder, index_tensors(index, opened), files, opened), index


def index_tensors(index: CheckpointIndex, opened: MappedFiles) -> dict[str, SourceTensor]:
    """Return every tensor of an index; the elements of a chunk are located when they are read."""
    layouts, path = ChunkLayouts(), cache(index.folder.joinpath)

    def block(chunk: TensorChunk, dtype: str) -> Block:
        locate = partial(_locate_chunk, layouts, opened, path(chunk.file), chunk, dtype)
        return Block(chunk.offsets, chunk.sizes, locate)

    return {
        name: SourceTensor(tensor.dtype, tensor.shape, tuple(block(c, tensor.dtype) for c in tensor.chunks))
        for name, tensor in index.tensors.items()
    }


def _locate_chunk(
    layouts: ChunkLayouts, opened: MappedFiles, path: Path, chunk: TensorChunk, dtype: str
) -> Location:
    """Locate the elements of a chunk; only the headers of its archive are read."""
    with explained(path):
        found = layouts(opened[path], chunk, dtype)
    return Location(path, found.offset, found.stride, found.record if found.protected else None)


def reorder_mamba(source: FileSource, config: Nemotron3Config, state: dict[str, Any]) -> FileSource:
    """Return the source with Mamba's tensors in the table's order: [z | x | B | C | dt], [x | B | C]."""
    lookup, table = NameLookup(config), symbol_sizes(config)
    changed: dict[str, SourceTensor] = {}
    tp: int | None = None
    for key, tensor in source.tensors.items():
        if non_weight_kind(key) is not None:
            continue
        try:
            match = lookup.key(key)
        except ValueError:  # the inventory reports it, unless --allow-unused covers it
            continue
        if match.row.tp != "parts" or match.spelling is match.row.spellings[0]:
            continue
        tp = _written_tp(source, state) if tp is None else tp
        if tensor.shape != tuple(table[symbol] for symbol in match.tensor.shape):
            continue  # another model; the inventory reports it
        try:
            plan = transforms.split_parameter(match.row, config, tp=tp)
        except ValueError as problem:
            raise CheckpointError(f"{source.folder}: written at TP={tp}, but {problem}") from None
        assert plan is not None
        changed[key] = SourceTensor(tensor.dtype, tensor.shape, _reordered(tensor, plan))
    return FileSource(source.folder, {**source.tensors, **changed}, source.files, source.opened)


def _written_tp(source: FileSource, state: dict[str, Any]) -> int:
    tp = stored_arguments(state).get("tensor_model_parallel_size")
    if type(tp) is not int or tp < 1:
        raise CheckpointError(
            f"{source.folder}: the order of Mamba's in_proj rows depends on the TP that wrote it, but its "
            f"stored arguments have tensor_model_parallel_size={tp!r}: save it with --ckpt-format torch_dist"
        )
    return tp


def _reordered(tensor: SourceTensor, plan: CopyPlan) -> tuple[Block, ...]:
    """Cut the blocks of a tensor that was stored rank by rank, and move them to their rows in `plan`."""
    blocks = []
    for piece in plan.pieces:
        (first, last), (begin, _) = piece.source_slices[0], piece.destination_slices[0]
        stored = int(piece.destination) * plan.destinations[piece.destination][0] + begin
        for block in tensor.blocks:
            low = max(stored, block.offsets[0])
            high = min(stored + last - first, block.offsets[0] + block.sizes[0])
            if low < high:
                location = partial(_location_from_row, block, low - block.offsets[0], ITEM_SIZE[tensor.dtype])
                offsets = (first + low - stored, *block.offsets[1:])
                blocks.append(Block(offsets, (high - low, *block.sizes[1:]), location))
    return tuple(blocks)


def _location_from_row(block: Block, row: int, item: int) -> Location:
    found = block.locate()
    offset = found.offset + row * found.stride[0] * item
    return Location(found.path, offset, found.stride, found.record)
