"""The keys of a Nemotron-H config.json: which field each is, and which values can be built.

Values that Megatron cannot build are refused (`FIXED`), keys that change no result are ignored (`IGNORED`),
and so are all others: no reader of the family uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

#: Field of `Nemotron3Config` -> its name in config.json, followed by other names in use.
FIELDS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim", "attention_head_dim"),
    "mamba_num_heads": ("mamba_num_heads",),
    "mamba_head_dim": ("mamba_head_dim",),
    "mamba_state_dim": ("ssm_state_size",),
    "mamba_num_groups": ("n_groups", "mamba_n_groups"),
    "mamba_conv_kernel": ("conv_kernel", "mamba_d_conv"),
    "mamba_chunk_size": ("chunk_size", "mamba_chunk_size"),
    "layernorm_epsilon": ("layer_norm_epsilon", "rms_norm_eps", "norm_eps"),
    "init_method_std": ("initializer_range",),
}
#: The same for models with dense layers.
DENSE: dict[str, tuple[str, ...]] = {"dense_ffn_hidden_size": ("intermediate_size",)}
#: The same for mixtures of experts.
MOE: dict[str, tuple[str, ...]] = {
    "num_moe_experts": ("n_routed_experts", "num_local_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size",),
    "moe_latent_size": ("moe_latent_size",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
}
#: Fields that are absent or null if the model has no such part.
OPTIONAL = {"moe_latent_size"}
#: Fields that are not needed to build the model: the reference's value is kept.
FREE = {"max_position_embeddings", "init_method_std"}

#: Block type -> layer kind; the first name of each kind is written.
BLOCKS = {
    "mamba": "M",
    "attention": "*",
    "moe": "E",
    "mlp": "-",
    "linear_attention": "M",
    "full_attention": "*",
}
BLOCK_OF = {kind: block for block, kind in reversed(BLOCKS.items())}
#: (pattern string, lists of block types) of the decoder and of one MTP block.
LAYERS = ("hybrid_override_pattern", ("layers_block_type", "layer_types"))
MTP_LAYERS = ("mtp_hybrid_override_pattern", ("mtp_layers_block_type",))
MTP_BLOCKS = "num_nextn_predict_layers"
#: What packed weights are, in the form of ModelOpt or compressed-tensors.
QUANTIZATION = "quantization_config"
#: Key of our own: how MTP is trained, which Hugging Face has no key for. transformers keeps it and does not
#: use it.
OWN = "megatron_nemotron3"
#: Fields in it -> type.
OWN_FIELDS: dict[str, type[int | float | bool]] = {
    "mtp_num_layers": int,
    "mtp_use_repeated_layer": bool,
    "mtp_loss_scaling_factor": float,
}

#: Keys with the only value that Megatron builds; keys in `WRITTEN` are written.
FIXED: dict[str, Any] = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "mamba_conv_bias": True,
    "mamba_dt_limit": (0.0, math.inf),
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_group": 1,
    "n_shared_experts": 1,
    "residual_in_fp32": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "time_step_limit": (0.0, math.inf),
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    # Not of the family: what such keys say of other models, whose parts or results are others.
    "attention_output_gate": False,
    "attn_logit_softcapping": None,
    "attn_output_gate": False,
    "embedding_multiplier": 1.0,
    "enable_expert_bias": True,
    "final_logit_softcapping": None,
    "first_k_dense_replace": 0,
    "layernorm_zero_centered_gamma": False,
    "lm_head_bias": False,
    "logits_scaling": 1.0,
    "moe_gate_bias": False,
    "moe_latent_up_projection_rmsnorm": False,
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "sigmoid",
    "moe_use_norm_before_up_proj": False,
    "norm_before_gate": False,
    "normalization": "RMSNorm",
    "num_shared_experts": 1,
    "position_embedding_type": "none",
    "qk_layernorm": False,
    "qk_norm": False,
    "residual_multiplier": 1.0,
    "rms_norm": True,
    "score_func": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_qk_norm": False,
    "use_sliding_window": False,
}
INFINITE = 1e30
#: Keys of the limits of time steps, of which the upper one is infinite.
LIMITS = ("time_step_limit", "mamba_dt_limit")
WRITTEN = (
    *("model_type", "attention_bias", "attention_dropout", "hidden_dropout", "mamba_hidden_act"),
    *("mamba_proj_bias", "mlp_bias", "mlp_hidden_act", "residual_in_fp32", "tie_word_embeddings"),
    *("use_bias", "use_conv_bias"),
)
WRITTEN_MOE = ("n_group", "n_shared_experts", "topk_group")
#: Whether the weights of a token's experts are divided by their sum. Megatron divides them unless there is
#: only one, which divided by itself would be 1.
NORMALIZED = "norm_topk_prob"
#: The smallest dt of a new model. transformers (up to 5.24, see its pull request 48989) also clamps every dt
#: below at the first of these keys, and at 0.001 without them. Megatron clamps nothing, nor does vLLM.
CLAMPS = ("mamba_dt_min", "time_step_min")
#: What is written, too. A tiny number would turn the clamp off, and spoil new models also after that request:
#: their dt is drawn between it and 0.1, so nearly all heads would begin at `time_step_floor`.
DEFAULT_CLAMP = 1e-3
#: Such a number, as files of before have it.
NO_CLAMP = 1e-30

#: Keys that change neither a tensor nor a result.
IGNORED = frozenset(
    (
        # file and libraries
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
        # token ids and tasks
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "id2label", "label2id"),
        *("problem_type", "is_encoder_decoder"),
        # inference
        *("use_cache", "use_mamba_kernels", "num_logits_to_keep", "chunk_size_feed_forward"),
        *("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "output_router_logits"),
        *("output_attentions", "output_hidden_states", "return_dict"),
        # positions: the family has no positional embeddings
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        # initialization (and a clamp: `clamp_note`)
        *("rescale_prenorm_residual", "time_step_max", "time_step_floor", *CLAMPS),
        *("mamba_dt_max", "mamba_dt_init_floor"),
        # redundant: the number of layers, relu2, heads * head_dim
        *("num_hidden_layers", "hidden_act", "intermediate_size", "expand", "mamba_expand"),
    )
)
#: Keys that describe MTP.
MTP_KEYS = {MTP_BLOCKS, MTP_LAYERS[0], *MTP_LAYERS[1], "mtp_block_configs", OWN}
#: Keys that describe a layer, and all that are read or known to change nothing.
OF_LAYERS = {key for table in (FIELDS, DENSE, MOE) for keys in table.values() for key in keys}
OF_LAYERS |= {*FIXED, NORMALIZED}
KNOWN = OF_LAYERS | IGNORED | {OWN, MTP_BLOCKS, LAYERS[0], *LAYERS[1], MTP_LAYERS[0], *MTP_LAYERS[1]}


def stated(data: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return what a file says under any of the names of a value; None if it says nothing."""
    found = {key: data[key] for key in keys if data.get(key) is not None}
    first = next(iter(found.values()), None)
    if any(value != first for value in found.values()):
        each = ", ".join(f"{key}={value!r:.100}" for key, value in found.items())
        raise ValueError(f"{each} contradict each other")
    return first


def positive_number(
    data: Mapping[str, Any], keys: Sequence[str], *, real: bool = False, optional: bool = False
) -> Any:
    """Return a number above 0 under any of its names; None if it is optional and not stated."""
    for key in keys:
        value = data.get(key)
        right = type(value) is int or (real and type(value) is float)
        if value is not None and not (right and 0 < value < (1 << 62 if real else math.inf)):
            raise ValueError(f"{key}={value!r:.60} is not a {'' if real else 'whole '}number above 0")
    found = stated(data, keys)
    if found is None and not optional:
        raise ValueError(f"config.json has no {' or '.join(keys)}")
    return found


@contextmanager
def named_errors(name: object, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """A ValueError that is raised inside the block says whose it is: "name: message"."""
    try:
        yield
    except ValueError as problem:
        raise kind(f"{name}: {problem}") from None
