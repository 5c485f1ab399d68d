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
from megatron_nemotron3.checkpoints.convert.job_options import SHARD_BYTES
from megatron_nemotron3.checkpoints.convert.omni_config import TEXT, omni_json, part
from megatron_nemotron3.checkpoints.convert.plan import whole
from megatron_nemotron3.checkpoints.convert.quantized import (
    Quantization,
    hf_quant_config,
    quantization_config,
)
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor
from megatron_nemotron3.checkpoints.convert.special_tokens import ID_KEYS, special_ids
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, Part, grouped
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig

_METADATA = {"format": "pt"}
GENERATION = "generation_config.json"


def files(tensors: Mapping[str, SourceTensor], limit: int = SHARD_BYTES) -> list[FilePlan]:
    """Plan the safetensors files with these tensors."""
    groups = list(grouped(tensors, limit, lambda name: tensors[name].nbytes))
    result = []
    for number, names in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        result.append(safetensors_plan(file, {name: tensors[name] for name in names}, _METADATA))
    return result


def safetensors_plan(file: str, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> FilePlan:
    """Plan a safetensors file."""
    head = safetensors_header(((name, t.dtype, t.shape) for name, t in tensors.items()), metadata)
    parts = [Part(tensor=name, slices=whole(t.shape), dtype=t.dtype) for name, t in tensors.items()]
    return FilePlan(file, [Part(head), *parts])


def index(plans: Sequence[FilePlan]) -> bytes | None:
    """Return the content of model.safetensors.index.json; None if there is only one file."""
    if len(plans) == 1:
        return None
    total = sum(part.length for plan in plans for part in plan.parts if part.tensor)
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
    """Return the other files of an HF folder: the index, config.json, `copied`, generation_config.json.

    Args:
        base: config.json whose other keys are kept; without one, the tokenizer in `copied` says token ids.
    """
    result = dict(copied or {})
    if (text := index(plans)) is not None:
        result[INDEX] = text
    if isinstance(config, OmniConfig):
        data = omni_json(config, reference=base, dtype=dtype)
    else:
        data = config_json.write(config, reference=base, dtype=dtype)
    text_keys = part(data, TEXT) or data
    if base is None:
        language = config.language if isinstance(config, OmniConfig) else config
        text_keys.update(special_ids(result, language.vocab_size))
    # Engines read the end token from it.
    if GENERATION not in result and (ids := {key: text_keys[key] for key in ID_KEYS if key in text_keys}):
        result[GENERATION] = (json.dumps(ids, indent=2) + "\n").encode()
    if quantization is not None:
        stated = hf_quant_config(quantization, "megatron-nemotron3")
        data[QUANTIZATION] = quantization_config(stated)
        result[HF_QUANT_CONFIG] = (json.dumps(stated, indent=2) + "\n").encode()
    result[CONFIG] = (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()
    return result
