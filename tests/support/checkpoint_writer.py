"""Write small torch_dist folders with torch's own index classes, several chunks and files per folder."""

from __future__ import annotations

import io
import json
import pickle
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_nemotron3.checkpoints.metadata import CheckpointIndex, DistTensor, StoredObject
from megatron_nemotron3.checkpoints.write import index_bytes as made_index

TRACKER = "latest_checkpointed_iteration.txt"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each stored type, a scalar, an empty one, three axes."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(12, 5, generator=made)
    return {
        "embedding.word_embeddings.weight": values,
        "decoder.layers.0.mixer.in_proj.weight.z": values.to(torch.bfloat16),
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": torch.randn(6, 4, 3, generator=made),
        "decoder.layers.1.mlp.router.expert_bias": torch.arange(7.0),
        "quantized": values.to(torch.float8_e4m3fn),
        "packed": torch.randint(0, 256, (9, 4), generator=made, dtype=torch.uint8),
        "flags": values > 0,
        "step": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
    }


def write(folder: Path, content: dict[str, torch.Tensor], iteration: int, files: int = 2) -> Path:
    """A checkpoint as megatron-core 0.19 leaves it: each tensor in chunks, in turn over the files."""
    folder.mkdir(parents=True)
    blobs: list[bytes] = [b""] * files
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}

    def store(index: MetadataIndex, value: Any) -> None:
        stream = io.BytesIO()
        torch.save(value, stream)
        number = len(places) % files
        places[index] = _StorageInfo(f"__{number}_0.distcp", len(blobs[number]), len(stream.getvalue()))
        blobs[number] += stream.getvalue()

    for name, tensor in content.items():
        chunks = []
        for offsets, part in _cut(tensor):
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
            store(MetadataIndex(name, torch.Size(offsets)), part.clone())
        properties = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
    arguments = Namespace(tensor_model_parallel_size=2, world_size=2, params_dtype=torch.bfloat16)
    entries["common_state/shard_0_1"] = BytesStorageMetadata()
    store(MetadataIndex("common_state/shard_0_1"), [{"args": arguments, "iteration": iteration}])
    for number, blob in enumerate(blobs):
        (folder / f"__{number}_0.distcp").write_bytes(blob)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    finish(folder)
    return folder


def finish(folder: Path) -> None:
    """Write what a save writes last."""
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))


def _cut(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Halves along the first axis, the second of them halved along the last."""
    if tensor.ndim == 0 or tensor.shape[0] < 2:
        return [((0,) * tensor.ndim, tensor)]
    rows = tensor.shape[0] // 2
    zeros = (0,) * (tensor.ndim - 1)
    first, second = tensor[:rows], tensor[rows:]
    if tensor.ndim == 1:
        return [((0,), first), ((rows,), second)]
    columns = tensor.shape[-1] // 2
    return [
        ((0, *zeros), first),
        ((rows, *zeros), second[..., :columns]),
        ((rows, *zeros[:-1], columns), second[..., columns:]),
    ]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.contiguous().flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8))


def index_bytes(stored: Mapping[str, DistTensor], objects: Mapping[str, StoredObject]) -> bytes:
    """The content of `.metadata` for tensors and objects at known places."""
    parts = CheckpointIndex(Path(), dict(stored), dict(objects)).items()
    return made_index(parts, {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()})
