"""The model of tests/golden/peft, as transformers builds it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config, get
from tests.support.hf_folders import hf_values
from tests.support.model_mapping import unclamped

FOLDER = Path(__file__).parents[1] / "golden" / "peft"
RANK = 3
#: Every dimension of its own length, every kind of layer, no MTP (transformers has none).
MODEL: Nemotron3Config = get("super-tiny").but(
    name="peft",
    pattern="ME-*E",
    hidden_size=24,
    vocab_size=61,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=4,
    mamba_num_heads=4,
    mamba_head_dim=7,
    mamba_state_dim=5,
    mamba_num_groups=2,
    dense_ffn_hidden_size=36,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=14,
    moe_shared_expert_intermediate_size=26,
    moe_latent_size=10,
    mtp_pattern=None,
    mtp_num_layers=0,
)
#: All that peft adapts in this family: not out_proj.
TARGETS: dict[str, Any] = {
    "target_modules": [
        *("in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
        *("fc1_latent_proj", "fc2_latent_proj"),
    ],
    "target_parameters": ["experts.up_proj", "experts.down_proj"],
}


def base_values() -> dict[str, Tensor]:
    """FP32 weights of the base, small enough that logits are of order 1."""
    values = hf_values(MODEL, seed=5, dtype="float32")
    return {n: v * 0.2 if v.dim() > 1 else v.abs() + 0.5 if "norm" in n else v for n, v in values.items()}


def transformers_model(folder: Path) -> Any:
    """NemotronHForCausalLM from a folder, with Megatron's unclamped time steps."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return unclamped(model).eval()


def hf_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's state by the names of a checkpoint: "backbone.", one tensor for each expert."""
    result = {}
    for name, value in state.items():
        name = re.sub(r"^model\.", "backbone.", name)
        if name.endswith((".experts.up_proj", ".experts.down_proj")):
            stem, _, projection = name.rpartition(".")
            result |= {f"{stem}.{e}.{projection}.weight": one.clone() for e, one in enumerate(value)}
        else:
            result[name] = value.clone()
    return result
