"""A random tiny model as two checkpoints: under torch_dist keys and under Hugging Face names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import config_json, inventory, views
from megatron_nemotron3.checkpoints.convert.plan import Slices, apply
from megatron_nemotron3.models import Nemotron3Config
from tests.support.convert_models import assemble, chunks
from tests.support.model_mapping import megatron_model, randomize


class InMemory(views.InMemory):
    """Tensors in memory; notes which names are read."""

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        super().__init__(folder, tensors)
        self.content, self.read_names = tensors, set[str]()

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        self.read_names.add(name)
        return super().read(name, slices)


@dataclass
class Pair:
    config: Nemotron3Config
    model: Any
    megatron: InMemory
    hf: InMemory


def pair(config: Nemotron3Config, folder: Path, seed: int, padded: int = 0) -> Pair:
    """Our torch model with random weights, and its tensors on both sides. Needs `world_of_one`.

    Args:
        padded: rows of random numbers behind Megatron's vocabulary.
    """
    model = megatron_model(config).eval()
    randomize(model, seed)
    tensors = assemble(chunks(model))
    megatron = {name: tensors[name] for name in tensors if "_extra_state" not in name}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        megatron[name] = torch.cat([megatron[name], torch.randn(padded, config.hidden_size)])
    hf = convert(config, megatron, config.vocab_size + padded)
    (folder / "config.json").write_text(json.dumps(config_json.write(config, dtype="float32")))
    return Pair(config, model, InMemory(megatron, folder), InMemory(hf, folder))


def convert(config: Nemotron3Config, megatron: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Convert Megatron's tensors to Hugging Face's."""
    result: dict[str, Tensor] = {}
    for mapping in inventory.mappings_of(config, megatron, padded_vocab_size=rows):
        result |= apply(mapping.to_hf(), {t.name: megatron[t.name] for t in mapping.megatron})
    return result
