"""Small Hugging Face folders to convert."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_nemotron3.checkpoints.convert import config_json, inventory, omni_inventory
from megatron_nemotron3.checkpoints.convert.inventory import Tensor
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig


def omni_tensors(config: OmniConfig, dtype: str = "bfloat16") -> list[Tensor]:
    """The tensors of a folder with encoders, without those that only some folders have."""
    found = [t for one in omni_inventory.mappings(config.language, config, {}) for t in one.hf]
    return [t._replace(dtype=dtype) if t.dtype == "bfloat16" else t for t in found]


def hf_values(config: Nemotron3Config, seed: int = 0, dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    """Random tensors of a model, under their Hugging Face names."""
    made = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randn(t.shape, generator=made).to(getattr(torch, t.dtype))
        for t in inventory.hf_tensors(config, dtype=dtype)
    }


def write_hf(
    folder: Path,
    config: Nemotron3Config,
    *,
    files: int = 1,
    values: dict[str, torch.Tensor] | None = None,
    dtype: str = "bfloat16",
) -> dict[str, torch.Tensor]:
    """A folder as the safetensors package and a JSON writer leave it. Returns the tensors."""
    folder.mkdir(parents=True)
    values = hf_values(config, dtype=dtype) if values is None else values
    names = list(values)
    (folder / "config.json").write_text(json.dumps(config_json.write(config, dtype=dtype)))
    if files == 1:
        save_file(values, folder / "model.safetensors", {"format": "pt"})
        return values
    where = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        where.update(dict.fromkeys(names[i::files], file))
        save_file({name: values[name] for name in names[i::files]}, folder / file, {"format": "pt"})
    total = sum(v.numel() * v.element_size() for v in values.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return values


def read_hf(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a folder with the safetensors package; the index must list exactly these."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    if (folder / "model.safetensors.index.json").exists():
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
        assert {folder / f for f in index["weight_map"].values()} == set(folder.glob("*.safetensors"))
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of two words, for frameworks that load or copy the model's."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"word": 0, "end": 1}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end").save_pretrained(folder)
