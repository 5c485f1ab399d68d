"""Rows of a stored tensor, by the converter's reader."""

from __future__ import annotations

import torch

from megatron_nemotron3.checkpoints.convert.sources import FileSource
from megatron_nemotron3.checkpoints.convert.torch_dist import index_tensors
from megatron_nemotron3.checkpoints.metadata import CheckpointIndex
from megatron_nemotron3.checkpoints.read import MappedFiles


def read_rows(index: CheckpointIndex, name: str, rows: slice | None = None) -> torch.Tensor:
    """The rows of the first axis, put together from all chunks."""
    opened = MappedFiles()
    source = FileSource(index.folder, index_tensors(index, opened), {}, opened)
    tensor = source.tensors[name]
    slices = [(0, n) for n in tensor.shape]
    if tensor.shape:
        start, stop, _ = (rows or slice(None)).indices(tensor.shape[0])
        slices[0] = (start, max(start, stop))
    return source.read(name, tuple(slices))
