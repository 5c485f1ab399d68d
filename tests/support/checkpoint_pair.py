"""A random tiny model as two checkpoints: under torch_dist keys and under Hugging Face names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import config_json, inventory
from megatron_nemotron3.checkpoints.convert.checksums import Reads
from megatron_nemotron3.checkpoints.convert.plan import apply
from megatron_nemotron3.models import Nemotron3Config
from tests.support.convert_models import assemble, chunks
from tests.support.model_mapping import megatron_model, randomize


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]


class InMemory:
    """A tensor source in memory, with the interface of those that read files; notes which names are read."""

    def __init__(self, tensors: dict[str, Tensor], folder: Path) -> None:
        self.content, self.folder, self.read_names = tensors, folder, set[str]()
        self.reads = Reads(folder)

    @property
    def tensors(self) -> dict[str, Entry]:
        return {
            n: Entry(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.content.items()
        }

    def read(self, name: str, slices: tuple[tuple[int, int], ...]) -> Any:
        self.read_names.add(name)
        part = self.content[name][tuple(slice(*s) for s in slices)].contiguous()
        return part.view({2: torch.uint16, 4: torch.uint32}[part.element_size()]).numpy().copy()


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
