"""A torch_dist checkpoint folder as a source: any layout, any version, one chunk looked into at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_nemotron3.checkpoint.archive import ArchiveError
from megatron_nemotron3.checkpoint.folders import RELEASE, TRACKER, checkpoint_path, iterations, read_tracker
from megatron_nemotron3.checkpoint.metadata import CheckpointError, CheckpointIndex, Chunk
from megatron_nemotron3.checkpoint.read import opened, tensor_layout
from megatron_nemotron3.checkpoint.structure import Verdict, check_structure
from megatron_nemotron3.convert.hf_folder import regular
from megatron_nemotron3.convert.stored import Block, Layout, Source, SourceTensor


def locate(folder: Path, iteration: int | None = None) -> Path:
    """The folder of one checkpoint, below a folder with a tracker or given itself.

    Raises:
        ValueError: there is none, or not of that iteration; the message lists what is there.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: " + ("it is not a folder" if folder.exists() else "it does not exist"))
    found = iterations(folder)
    release = (folder / RELEASE).is_dir()
    if iteration is not None:
        if iteration not in found:
            there = ", ".join(map(str, found)) or "none"
            raise ValueError(f"{folder}: there is no iteration {iteration}; there are: {there}")
        return checkpoint_path(folder, iteration)
    if not found and not release:
        return folder
    try:
        named = read_tracker(folder)
    except ValueError as problem:
        raise ValueError(f"{folder / TRACKER}: it {problem}: give --iteration") from None
    if named is None:
        raise ValueError(f"{folder}: {TRACKER} is missing: give --iteration, one of {found}")
    return checkpoint_path(folder, named)


def open_dist(folder: Path, verdict: Verdict | None = None) -> tuple[Source, CheckpointIndex]:
    """Every tensor of a torch_dist folder, optimizer state and all, and its index.

    Raises:
        CheckpointError: the folder is unfinished or damaged, or a file leads out of it.
    """
    verdict = verdict or check_structure(folder)
    if verdict.state != "complete" or verdict.index is None:
        problem = verdict.problems[0] if verdict.problems else f"{folder}: not a torch_dist checkpoint"
        raise CheckpointError(f"{problem} ({verdict.state}; `nemotron3 check {folder}` says more)")
    index = verdict.index
    files = {name: regular(folder / name, folder) for name in index.files}
    return Source(folder, tensors_of(index), files), index


def tensors_of(index: CheckpointIndex) -> dict[str, SourceTensor]:
    """Every tensor of an index; where a chunk's elements are is looked up when they are read."""

    def block(chunk: Chunk, dtype: str) -> Block:
        return Block(chunk.offsets, chunk.sizes, partial(_find, index.folder, chunk, dtype))

    return {
        name: SourceTensor(tensor.dtype, tensor.shape, tuple(block(c, tensor.dtype) for c in tensor.chunks))
        for name, tensor in index.tensors.items()
    }


def _find(folder: Path, chunk: Chunk, dtype: str) -> Layout:
    """Where the elements of a chunk are; reads the headers of its archive."""
    path = folder / chunk.file
    with opened(path) as descriptor:
        found = tensor_layout(descriptor, chunk)
        if found.shape != chunk.sizes:
            raise ArchiveError(f"the chunk at {chunk.offset:,} has shape {found.shape}, not {chunk.sizes}")
        if found.dtype != dtype:
            raise ArchiveError(f"the chunk at {chunk.offset:,} is {found.dtype}, not {dtype}")
    return Layout(path, found.offset, found.stride)
