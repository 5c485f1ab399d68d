"""Megatron -> Hugging Face: plan the files of an HF folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
from megatron_nemotron3.checkpoints.convert.hf_folder import (
    CONFIG,
    HF_QUANT_CONFIG,
    INDEX,
    SINGLE,
    safetensors_header,
)
from megatron_nemotron3.checkpoints.convert.omni_config import omni_json
from megatron_nemotron3.checkpoints.convert.plan import whole
from megatron_nemotron3.checkpoints.convert.quantized_config import hf_quant_config, quantization_config
from megatron_nemotron3.checkpoints.convert.quantized_recipes import Quantization
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, Part
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig

#: 5GB as Hugging Face counts it.
SHARD_BYTES = 5 * 10**9
_METADATA = {"format": "pt"}


def _shards(tensors: Mapping[str, SourceTensor], limit: int) -> dict[str, list[str]]:
    """Map each file name to its tensors: in order, as many as fit into `limit` bytes, but at least one."""
    groups: list[list[str]] = []
    size = limit
    for name, tensor in tensors.items():
        if size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def files(tensors: Mapping[str, SourceTensor], limit: int = SHARD_BYTES) -> list[FilePlan]:
    """Plan the safetensors files with these tensors."""
    result = []
    for file, names in _shards(tensors, limit).items():
        head = safetensors_header(
            ((name, tensors[name].dtype, tensors[name].shape) for name in names), _METADATA
        )
        parts = [Part(head=head)]
        parts += [Part(tensor=n, slices=whole(tensors[n].shape), dtype=tensors[n].dtype) for n in names]
        result.append(FilePlan(file, parts))
    return result


def index(plans: Sequence[FilePlan]) -> bytes | None:
    """Return the content of model.safetensors.index.json; None if there is only one file."""
    if len(plans) == 1:
        return None
    total = sum(part.data_length for plan in plans for part in plan.parts)
    where = {part.tensor: plan.name for plan in plans for part in plan.parts if part.tensor}
    data = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(data, indent=2) + "\n").encode()


def small_files(
    config: Nemotron3Config | OmniConfig,
    plans: Sequence[FilePlan],
    *,
    copied: Mapping[str, bytes] | None = None,
    base: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    quantization: Quantization | None = None,
) -> dict[str, bytes]:
    """Return the other files of an HF folder: the index, config.json with other keys of `base`, `copied`."""
    result = dict(copied or {})
    if (text := index(plans)) is not None:
        result[INDEX] = text
    if isinstance(config, OmniConfig):
        data = omni_json(config, reference=base, dtype=dtype)
    else:
        data = config_json.write(config, reference=base, dtype=dtype)
    if quantization is not None:
        stated = hf_quant_config(quantization, "megatron-nemotron3")
        data[QUANTIZATION] = quantization_config(stated)
        result[HF_QUANT_CONFIG] = (json.dumps(stated, indent=2) + "\n").encode()
    result[CONFIG] = (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()
    return result
