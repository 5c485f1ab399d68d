"""A model whose MTP block often agrees with it, without training.

The layers add little to the embedding, and eh_proj passes on the embedding of the newest token, as in a model
that predicts from its last token alone. How much the layers add decides how often drafts are accepted.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.weights import read_weights
from megatron_nemotron3.models import Nemotron3Config, get
from tests.convert.logits.pair import InMemory

from .models import CONTEXT, tensors

_LAYER_ENDS = (
    "out_proj.weight",
    "o_proj.weight",
    "fc2_latent_proj.weight",
    "shared_experts.down_proj.weight",
)


def agreeing_tensors(config: Nemotron3Config, strength: float, seed: int = 0) -> dict[str, Tensor]:
    """Tensors as `models.tensors`.

    Args:
        strength: of what layers add; 0: MTP always agrees.
    """
    d, result = config.hidden_size, tensors(config, seed)
    for name in result:
        if name.endswith(_LAYER_ENDS):
            result[name] *= strength
        elif name.endswith("eh_proj.weight"):
            noise = result[name] * 0.1 * strength
            result[name] = torch.cat((torch.eye(d), torch.zeros(d, d)), 1) + noise
        elif name.endswith(("norm.weight", "norm_f.weight", "enorm.weight", "final_layernorm.weight")):
            result[name] = torch.ones_like(result[name])
    # Of the size that layers give, so that what they add is of the same order.
    result["backbone.embeddings.weight"] = (
        torch.nn.functional.normalize(result["backbone.embeddings.weight"], dim=-1) * d**0.5
    )
    return result


@functools.cache
def agreeing(strength: float, seed: int = 0, **changes: int | str) -> Engine:
    """An engine of "super-tiny", or of a changed one."""
    config = get("super-tiny").but(**changes)
    made = agreeing_tensors(config, strength, seed)
    return Engine(read_weights(InMemory(made, Path()), config), max_context=CONTEXT)


def small(strength: float, seed: int = 0) -> Engine:
    """The same with few layers and a vocabulary of 8."""
    return agreeing(
        strength, seed, pattern="M*E", hidden_size=32, vocab_size=8, num_moe_experts=4, moe_router_topk=2
    )
