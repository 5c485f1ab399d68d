"""Sources in memory, random models, and scales, for the tests of packed checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_nemotron3.checkpoints.convert import inventory, to_hf
from megatron_nemotron3.checkpoints.convert.plan import Slices
from megatron_nemotron3.checkpoints.convert.quantized import formats
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.streams import write
from megatron_nemotron3.checkpoints.convert.views import InMemory
from megatron_nemotron3.models import Nemotron3Config

TINY = ("super-tiny", "ultra-tiny", "nano-tiny", "lightning-tiny")


class Memory(InMemory):
    """Tensors in memory; counts what is read of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(Path("memory"), tensors)
        self.calls: list[tuple[str, int]] = []

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        result = super().read(name, slices)
        self.calls.append((name, result.nbytes))
        return result


def random_model(config: Nemotron3Config, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        t.name: (torch.randn(t.shape, generator=generator) * 0.05).to(
            torch.float32 if t.dtype == "float32" else dtype
        )
        for t in inventory.hf_tensors(config)
    }


def all_scales(config: Nemotron3Config, recipe: str) -> dict[str, float]:
    """A number of its own for everything that can have one."""
    kinds = formats(config, recipe)
    skip = "nvfp4" if config.name.startswith("lightning") else ""
    names = [n.removesuffix("weight") + "input_scale" for n, k in kinds.items() if k not in ("bf16", skip)]
    for layer, kind in enumerate(config.pattern):
        if kind == "*":
            names += [f"backbone.layers.{layer}.mixer.{x}_proj.{x}_scale" for x in "kv"]
    return {name: (i + 1) / 1024 for i, name in enumerate(names)}


def written(folder: Path, source: TensorSource) -> Path:
    folder.mkdir()
    plans = to_hf.files(source.tensors, 1 << 20)
    for plan in plans:
        write(plan, source, folder / plan.name, lambda n: None)
    index = to_hf.index(plans)
    if index:
        (folder / "model.safetensors.index.json").write_bytes(index)
    return folder
