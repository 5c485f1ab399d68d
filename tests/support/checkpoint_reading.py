"""Rows of a stored tensor as a torch tensor, by the converter's reader."""

from __future__ import annotations

import torch

from megatron_nemotron3.checkpoints.convert.sources import FileSource
from megatron_nemotron3.checkpoints.convert.torch_dist import index_tensors
from megatron_nemotron3.checkpoints.convert.views import as_tensor
from megatron_nemotron3.checkpoints.metadata import CheckpointIndex


def read_rows(index: CheckpointIndex, name: str, rows: slice | None = None) -> torch.Tensor:
    """The rows of the first axis, put together from all chunks."""
    source = FileSource(index.folder, index_tensors(index), {})
    tensor = source.tensors[name]
    slices = [(0, n) for n in tensor.shape]
    if tensor.shape:
        start, stop, _ = (rows or slice(None)).indices(tensor.shape[0])
        slices[0] = (start, max(start, stop))
    try:
        return as_tensor(source.read(name, tuple(slices)), tensor.dtype)
    finally:
        source.close()
