"""Prune, load and save a model that is whole in the memory of one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_nemotron3.checkpoints.convert import from_hf, inventory
from megatron_nemotron3.checkpoints.convert.job import Job, run
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.views import Converted, InMemory
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import PARAMETER
from megatron_nemotron3.post_training.compress.cut import CutTensors
from megatron_nemotron3.post_training.compress.scores import Scores
from megatron_nemotron3.post_training.compress.sizes import Sizes, candidate_config

_EMBEDDING = "embedding.word_embeddings.weight"


def prune(
    model: torch.nn.Module, scores: Scores, sizes: Sizes
) -> tuple[Nemotron3Config, dict[str, torch.Tensor]]:
    """Return the config and the weights that are left of a model, which stays as it is."""
    number = sizes.get("num_layers", scores.config.num_layers)
    assert isinstance(number, int)
    layers = scores.layers(number)
    pruned = candidate_config(scores.config, sizes, layers)
    weights = model.state_dict()
    rows = weights[_EMBEDDING].shape[0]
    cut = CutTensors(_hf_view(weights, scores.config), scores, pruned, layers)
    mappings = inventory.mappings(pruned, dialect=PARAMETER, padded_vocab_size=rows)
    view = Converted(cut, mappings, to_hf=False)
    return pruned, {name: view.read(name).clone() for name in view.tensors}


def load(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights into a model of their config.

    Raises:
        RuntimeError: names or shapes differ, except for TransformerEngine's empty state.
    """
    missing, unknown = model.load_state_dict(weights, strict=False)  # raises where shapes differ
    if odd := sorted(name for name in (*missing, *unknown) if not name.endswith("_extra_state")):
        raise RuntimeError(
            f"weights do not fit the model: {len(odd)} names are on one side only, first {odd[0]}"
        )


def save(model: torch.nn.Module, config: Nemotron3Config, folder: Path) -> None:
    """Write a release checkpoint (torch_dist) to a new folder, as `nemotron3 convert from-hf` does."""
    weights = model.state_dict()
    embedding = weights[_EMBEDDING]
    rows, dtype = embedding.shape[0], str(embedding.dtype).removeprefix("torch.")
    mappings = inventory.mappings(config, padded_vocab_size=rows)
    view = Converted(_hf_view(weights, config), mappings, to_hf=False)
    plan = from_hf.plan(view, config, padded_vocab_size=rows, dtype=dtype)
    run(Job(folder, view, plan.files, plan.small, plan.index, {"model": config.name}))


def _hf_view(weights: Mapping[str, Any], config: Nemotron3Config) -> TensorSource:
    tensors = {
        name: t.detach().cpu()
        for name, t in weights.items()
        if isinstance(t, torch.Tensor) and not name.endswith("_extra_state")
    }
    rows = weights[_EMBEDDING].shape[0]
    mappings = inventory.mappings(config, dialect=PARAMETER, padded_vocab_size=rows)
    return Converted(InMemory(Path(os.devnull), tensors), mappings, to_hf=True)
