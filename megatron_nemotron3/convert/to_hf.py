"""Megatron -> Hugging Face: the plan of an HF folder, file by file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_nemotron3.checkpoint.metadata import CheckpointError
from megatron_nemotron3.convert import config_json
from megatron_nemotron3.convert.hf_folder import CONFIG, INDEX, SINGLE, read_config, regular
from megatron_nemotron3.convert.plan import whole
from megatron_nemotron3.convert.quantized_config import hf_quant_config, quantization_config
from megatron_nemotron3.convert.quantized_export import Quantization
from megatron_nemotron3.convert.safetensors_header import header
from megatron_nemotron3.convert.stored import SourceTensor
from megatron_nemotron3.convert.streams import FilePlan, Part
from megatron_nemotron3.models import Nemotron3Config

#: What Hugging Face calls 5GB.
SHARD_BYTES = 5 * 10**9
#: What ModelOpt's exporter writes beside config.json.
QUANTIZED = "hf_quant_config.json"
_METADATA = {"format": "pt"}
#: Files of a reference that are copied as they are, besides those of these endings.
_COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.json"),
)
_COPIED_ENDINGS = (".py", ".jinja", ".tiktoken")


def shards(tensors: Mapping[str, SourceTensor], limit: int = SHARD_BYTES) -> dict[str, list[str]]:
    """File name -> its tensors: as many as fit into `limit` bytes, in the order given; at least one."""
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
    """The safetensors files with these tensors."""
    result = []
    for file, names in shards(tensors, limit).items():
        head = header(((name, tensors[name].dtype, tensors[name].shape) for name in names), _METADATA)
        parts = [Part(head=head)]
        parts += [Part(tensor=n, slices=whole(tensors[n].shape), dtype=tensors[n].dtype) for n in names]
        result.append(FilePlan(file, parts))
    return result


def index(tensors: Mapping[str, SourceTensor], limit: int = SHARD_BYTES) -> bytes | None:
    """model.safetensors.index.json; None if there is one file only."""
    by_file = shards(tensors, limit)
    if len(by_file) == 1:
        return None
    total = sum(tensor.nbytes for tensor in tensors.values())
    where = {name: file for file, names in by_file.items() for name in names}
    data = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(data, indent=2) + "\n").encode()


def small_files(
    config: Nemotron3Config,
    tensors: Mapping[str, SourceTensor],
    *,
    limit: int = SHARD_BYTES,
    reference: Path | None = None,
    dtype: str = "bfloat16",
    quantization: Quantization | None = None,
) -> dict[str, bytes]:
    """Everything of an HF folder but the tensors: index, config.json, and what the reference has.

    Raises:
        CheckpointError: a file of the reference cannot be read.
        ValueError: the reference is another model.
    """
    result = {}
    if (text := index(tensors, limit)) is not None:
        result[INDEX] = text
    base = None
    if reference is not None:
        result.update(_copied(reference))
        base = read_config(reference) if (reference / CONFIG).exists() else None
    data = config_json.write(config, reference=base, dtype=dtype)
    if quantization is not None:
        stated = hf_quant_config(quantization, "megatron-nemotron3")
        data["quantization_config"] = quantization_config(stated)
        result[QUANTIZED] = (json.dumps(stated, indent=2) + "\n").encode()
    result[CONFIG] = (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()
    return result


def _copied(reference: Path) -> dict[str, bytes]:
    if not reference.is_dir():
        raise ValueError(f"{reference}: the reference is no folder")
    result = {}
    for path in sorted(reference.iterdir()):
        if path.name in _COPIED or path.name.endswith(_COPIED_ENDINGS):
            regular(path, reference)
            try:
                result[path.name] = path.read_bytes()
            except OSError as problem:
                raise CheckpointError(f"{path}: {problem.strerror}") from None
    return result
