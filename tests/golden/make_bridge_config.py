"""Write bridge_run_config.yaml: the model section of Megatron-Bridge's run_config.yaml for Super.

    BRIDGE_PYTHON tests/golden/make_bridge_config.py

needs megatron-bridge 0.6.2. It records the fields of Bridge's provider as they are; only values that YAML
cannot hold become their import paths, as in Bridge's own file. Most fields are at Megatron's defaults.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.core.activations import squared_relu

from megatron_nemotron3 import models

_SAME = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "layernorm_epsilon"),
    *("init_method_std", "num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "moe_router_topk", "moe_router_topk_scaling_factor", "moe_router_bias_update_rate"),
    *("moe_aux_loss_coeff", "mtp_num_layers", "mtp_use_repeated_layer", "mtp_loss_scaling_factor"),
    *("vocab_size", "seq_length"),
)


def plain(value: Any) -> Any:
    """Return a value as YAML can hold it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    named = value if hasattr(value, "__qualname__") else type(value)
    return {"_target_": f"{named.__module__}.{named.__qualname__}"}


def main() -> None:
    """Write the file beside this script."""
    config = models.SUPER
    provider = HybridModelProvider(
        hybrid_layer_pattern=config.full_pattern,
        activation_func=squared_relu,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_router_dtype="fp32",
        calculate_per_token_loss=True,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=64,
        expert_tensor_parallel_size=1,
        **{name: getattr(config, name) for name in _SAME},
    )
    fields = [field.name for field in dataclasses.fields(provider) if not field.name.startswith("_")]
    model = {name: plain(getattr(provider, name, None)) for name in fields}
    file = Path(__file__).with_name("bridge_run_config.yaml")
    file.write_text(yaml.safe_dump({"model": model}, sort_keys=True))


if __name__ == "__main__":
    main()
