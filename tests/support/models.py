"""Small stock models for tests, and what the golden file records of them. Needs torch and megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_nemotron3.proof.certify.ranks import initialize

#: TransformerConfig fields of every model in golden/stock_te_models.json.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
}
VOCABULARY = 256
#: TransformerConfig fields: every layer is computed again in backward.
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

#: Pattern and extra fields of the golden models; the layouts are (world size, arguments of `initialize`).
GOLDEN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "super_like": ("MEM*E/*E/*E", {"mtp_use_repeated_layer": True, "moe_latent_size": 32}),
    "dense_hybrid": ("M-M*-", {}),
}
GOLDEN_LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "": (1, {}),
    "_tp2_ep2": (2, {"tp": 2, "ep": 2, "etp": 1}),
}


def hybrid_config(pattern: str, **overrides: Any) -> Any:
    """A TransformerConfig for `pattern`: `SIZES`, the layout of `initialize`, then `overrides`."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
    from megatron.core.transformer import TransformerConfig

    parsed = parse_hybrid_pattern(pattern)
    assert parsed.main_pattern is not None
    tp = parallel_state.get_tensor_model_parallel_world_size()
    fields: dict[str, Any] = {
        **SIZES,
        "num_layers": sum(character not in "|[]" for character in parsed.main_pattern),
        "mtp_num_layers": parsed.mtp_num_depths or None,
        "activation_func": squared_relu,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "is_hybrid_model": True,
    }
    if "E" not in pattern:
        fields = {k: v for k, v in fields.items() if not k.startswith("moe_") and k != "num_moe_experts"}
    return TransformerConfig(**{**fields, **overrides})


def build_hybrid(pattern: str, spec: Any, *, seq_length: int = 64, **overrides: Any) -> Any:
    """Stock `HybridModel` for this rank, untied and without positional embedding.

    Args:
        pattern: `--hybrid-layer-pattern`, with `|` between pipeline stages and `/` before MTP depths.
        spec: ModuleSpec of the layer stack.
        overrides: TransformerConfig fields over `SIZES` and the layout of `initialize`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(
        hybrid_config(pattern, **overrides),
        spec,
        VOCABULARY,
        seq_length,
        hybrid_layer_pattern=pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def describe(model: Any) -> dict[str, Any]:
    """What golden/stock_te_models.json records of a model: `parameters` and this rank's `checkpoint`."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.validation import (
        determine_global_metadata,
        validate_sharding_integrity,
    )

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    # Upstream's own check before a save: the main replicas of all ranks cover every tensor exactly once.
    validate_sharding_integrity(determine_global_metadata(state)[1])
    checkpoint: dict[str, Any] = {}
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            entry = checkpoint.setdefault(value.key, {"global_shape": [*value.global_shape], "chunks": []})
            chunk = {"offset": [*value.global_offset], "shape": [*value.local_shape]}
            # A layer that MTP repeats, or replicas, name the same chunk again.
            if chunk not in entry["chunks"]:
                entry["chunks"].append(chunk)
        else:
            checkpoint[value.key] = "object"
    parameters = {name: [*p.shape] for name, p in model.named_parameters()}
    return {"parameters": parameters, "checkpoint": checkpoint}


def describe_golden_model(model: str, layout: dict[str, int], spec_module: str, spec_name: str) -> Any:
    """Build a golden model with the named spec on this rank and describe it; for `run_distributed`."""
    from megatron.core.transformer.spec_utils import import_module

    initialize(**layout)
    pattern, fields = GOLDEN_MODELS[model]
    built = build_hybrid(pattern, import_module((spec_module, spec_name)), **fields)
    classes = {"decoder": _class_name(built.decoder), "final_norm": _class_name(built.decoder.final_norm)}
    return {**describe(built), **classes}


def _class_name(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def golden_file() -> Path:
    """The recorded models."""
    return Path(__file__).parents[1] / "golden" / "stock_te_models.json"
