"""Convert a model to the arguments that Megatron stores in its checkpoints, and back.

Megatron stores the `argparse.Namespace` of its command line in every checkpoint. `--use-checkpoint-args`
takes the model from it, and a resumed run compares some of it. Here it identifies the model of a folder. The
arguments are written as the flags of `nemotron3 flags` produce them, except for choices of a run: --spec,
grouped GEMM, tokenizer. Names changed over time (`_NAMES`).
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from megatron_nemotron3.checkpoints.convert.config_keys import named_errors
from megatron_nemotron3.checkpoints.pickles import Inert
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as patterns
from megatron_nemotron3.models.config import FLOATS
from megatron_nemotron3.models.stack_specs import ARGUMENT, experts_text, read_experts, stored_experts

#: Configuration fields that the arguments state, most of them under their own names.
_MODEL = (
    *("hidden_size", "seq_length", "max_position_embeddings"),
    *("num_attention_heads", "num_query_groups", "kv_channels"),
    *("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
    # Not an option of Megatron, which always uses 128; it changes neither a tensor nor a result.
    "mamba_chunk_size",
    *("layernorm_epsilon", "init_method_std"),
)
_MOE = (
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "moe_router_topk_scaling_factor"),
    *("moe_aux_loss_coeff", "moe_router_bias_update_rate"),
)
#: Field -> all its names in the arguments, the present one first.
_NAMES = {
    "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
    "num_moe_experts": ("num_experts", "num_moe_experts"),
}
#: Fields that change no tensor. If a checkpoint lacks them, the defaults are used.
_TRAINING = frozenset(
    (
        *("seq_length", "max_position_embeddings", "layernorm_epsilon", "init_method_std"),
        *("moe_aux_loss_coeff", "moe_router_bias_update_rate"),
    )
)
_INIT_STD = 0.02  # default of --init-method-std
#: Fields that 0 turns off.
_MAY_BE_ZERO = frozenset(("moe_aux_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor"))

#: Arguments of every Nemotron-H model -> (value, meaning of another value). A missing argument is taken to
#: have this value.
_FAMILY: dict[str, tuple[Any, str]] = {
    "group_query_attention": (True, ""),
    "squared_relu": (True, "an activation other than squared ReLU"),
    "swiglu": (False, "gated MLPs"),
    "normalization": ("RMSNorm", "other norms"),
    "add_bias_linear": (False, "biases of linear layers"),
    "add_qkv_bias": (False, "biases of attention"),
    "untie_embeddings_and_output_weights": (True, "an output layer that is the embedding"),
    "position_embedding_type": ("none", "positional embeddings"),
    "use_rotary_position_embeddings": (False, "rotary embeddings"),
    "attention_dropout": (0.0, ""),
    "hidden_dropout": (0.0, ""),
}
_MOE_FAMILY: dict[str, tuple[Any, str]] = {
    "moe_router_score_function": ("sigmoid", "another router"),
    "moe_router_enable_expert_bias": (True, "a router without expert bias"),
    "moe_router_load_balancing_type": ("seq_aux_loss", ""),
}
#: Options that add tensors or change results, and that no published model uses -> what they add.
_ABSENT: dict[str, str] = {
    "qk_layernorm": "norms of queries and keys",
    "qk_l2_norm": "norms of queries and keys",
    "layernorm_zero_centered_gamma": "norms that store their weight minus 1",
    "apply_layernorm_1p": "norms that store their weight minus 1",
    "multi_latent_attention": "multi-latent attention",
    "attention_output_gate": "gated attention",
    "moe_shared_expert_gate": "a gate of the shared expert",
    "moe_router_pre_softmax": "another router",
    "moe_apply_probs_on_input": "another router",
}
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": None}
_CHUNK = 128


def args_of(config: Nemotron3Config, *, padded_vocab_size: int, dtype: str = "bfloat16") -> Namespace:
    """Return the arguments to store with a model's weights; Megatron 0.16 to 0.19 read the model from them.

    They state that the checkpoint contains no optimizer and no random state. They do not contain `--spec`:
    both the stock spec and ours load the weights; experts that differ by layer are stated in a name of ours.
    """
    if dtype not in _PRECISIONS:
        raise ValueError(f"{config.name}: Megatron trains in {', '.join(_PRECISIONS)}, not in {dtype}")
    if padded_vocab_size < config.vocab_size:
        raise ValueError(f"padded_vocab_size={padded_vocab_size} is less than vocab_size={config.vocab_size}")
    config.require_built()
    values: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hybrid_layer_pattern": config.full_pattern,
        # 0.16 reads the older name, without MTP; 0.17 and later read the newer name.
        "hybrid_override_pattern": config.pattern,
        "is_hybrid_model": True,
        "ffn_hidden_size": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "add_position_embedding": True,  # the default, compared on resuming; position_embedding_type wins
        "mtp_num_layers": config.mtp_num_layers or None,
    }
    tables = [(_MODEL, _FAMILY)] + [(_MOE, _MOE_FAMILY)] * config.is_moe
    for fields, family in tables:
        values |= {_names(field)[0]: getattr(config, field) for field in fields}
        values |= {name: value for name, (value, _) in family.items()}
    if config.moe_layers is not None:
        values[ARGUMENT] = experts_text(config)
    if config.has_mtp:
        values["mtp_use_repeated_layer"] = config.mtp_use_repeated_layer
        values["mtp_loss_scaling_factor"] = config.mtp_loss_scaling_factor
    values |= {
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
    }
    return Namespace(**values)


def common_state(args: Namespace) -> dict[str, Any]:
    """Return the state that a checkpoint stores in common.pt and in the `common_state` object.

    The iteration is 0: the weights are a starting point. `content_metadata` states that experts are stacked.
    """
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False},
    }


def config_of(
    args: Namespace | Inert, *, name: str = "megatron", vocab_size: int | None = None
) -> Nemotron3Config:
    """Return the model that stored arguments describe."""
    values = args.state if isinstance(args, Inert) else vars(args)
    if not isinstance(values, dict):
        raise ValueError(f"{name}: the stored arguments are a {type(values).__name__}, not named values")
    pattern = stored_pattern(name, values)
    with named_errors(name):
        fields = _stated_fields(values, pattern, vocab_size)
    return Nemotron3Config(
        name=name,
        title=name,
        pattern=pattern.main,
        mtp_pattern=pattern.mtp_pattern,
        mtp_num_layers=pattern.mtp_num_layers,
        **fields,
    )


def _stated_fields(
    values: dict[str, Any], pattern: patterns.HybridPattern, vocab_size: int | None
) -> dict[str, Any]:
    """Return the fields of the configuration but for its name and layers."""
    kinds = pattern.main + (pattern.mtp_pattern or "")
    _check_family(values, "E" in kinds)
    fields = {field: _stored_number(values, field) for field in _MODEL}
    if values.get("group_query_attention") is False:
        fields["num_query_groups"] = fields["num_attention_heads"]
    if "E" in kinds:
        fields |= {field: _stored_number(values, field) for field in _MOE}
        fields["moe_use_norm_before_up_proj"] = bool(values.get("moe_use_norm_before_up_proj"))
    fields |= _argument_defaults(values, fields, kinds)
    fields = {field: value for field, value in fields.items() if value is not None or field not in _TRAINING}
    fields.setdefault("init_method_std", _INIT_STD)
    missing = [
        _names(field)[0]
        for field in _MODEL + (_MOE if "E" in kinds else ())
        if fields.get(field, 0) is None and field != "moe_latent_size"
    ]
    if missing:
        raise ValueError(f"the stored arguments have no {', '.join(missing)}")
    if pattern.mtp:
        factor = _stored_number(values, "mtp_loss_scaling_factor")
        fields["mtp_use_repeated_layer"] = bool(values.get("mtp_use_repeated_layer"))
        fields |= {} if factor is None else {"mtp_loss_scaling_factor": factor}
    fields["vocab_size"] = _vocabulary_size(values, vocab_size)
    fields["moe_layers"] = _stored_moe_layers(values) if "E" in pattern.main else None
    return fields


def _stored_moe_layers(values: dict[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """Return the experts of each E layer: our stack and converter store them, or the stack's name says it."""
    text = stored_experts(values)
    if text is None:
        spec = f"--spec {values.get('spec')!r:.100}, a stack of one's own"
        raise ValueError(
            f"the stored arguments have {'no pattern but a list' if ARGUMENT in values else spec}, which may "
            "have other sizes in each layer: give the model (--model NAME or FILE)"
        )
    try:
        return read_experts(text)
    except ValueError as problem:
        raise ValueError(f"the stored {problem}") from None


def require_experts(name: str, values: dict[str, Any], model: Nemotron3Config) -> None:
    """Check that a model has the experts per layer that stored arguments state, if they do."""
    stored = stored_experts(values)
    if stored is not None and stored != experts_text(model):
        texts = [text or "are those of all layers alike" for text in (experts_text(model), stored)]
        raise ValueError(
            f"{name}: --model {model.name}: its experts of each layer (width:per token) {texts[0]:.200}; "
            f"those that the checkpoint states {texts[1]:.200}"
        )


def stored_pattern(name: str, values: dict[str, Any]) -> patterns.HybridPattern:
    """Parse hybrid_layer_pattern, or the two names used up to 0.16."""
    text = values.get("hybrid_layer_pattern") or values.get("hybrid_override_pattern")
    if not isinstance(text, str):
        raise ValueError(
            f"{name}: the stored arguments have no hybrid_layer_pattern and no hybrid_override_pattern, and "
            "the names of tensors tell no layers of a hybrid model: give the model (--model NAME or FILE)"
        )
    mtp, depths = values.get("mtp_hybrid_override_pattern"), values.get("mtp_num_layers") or 0
    if isinstance(mtp, str) and type(depths) is int and patterns.MTP_SEPARATOR not in text:
        text += f"{patterns.MTP_SEPARATOR}{mtp}" * depths
    with named_errors(name):
        return patterns.parse(text)


def _check_family(values: dict[str, Any], moe: bool) -> None:
    family = _FAMILY | (_MOE_FAMILY if moe else {}) | {name: (False, what) for name, what in _ABSENT.items()}
    wrong = [
        f"{argument}={values[argument]!r} ({meaning})"
        for argument, (value, meaning) in family.items()
        if meaning and values.get(argument, value) not in (value, None)
    ]
    groups = values.get("moe_router_num_groups")
    if moe and groups not in (None, 1):
        wrong.append(f"moe_router_num_groups={groups!r} (experts chosen by groups)")
    if wrong:
        raise ValueError("it is not a Nemotron-H model: no such model has " + ", ".join(wrong))


def _names(field: str) -> tuple[str, ...]:
    return _NAMES.get(field, (field,))


def _stored_number(values: dict[str, Any], field: str) -> Any:
    """Return the value of the first of a field's names that has one; None if none has."""
    names = _names(field)
    argument = next((n for n in names if values.get(n) is not None), names[0])
    value = values.get(argument)
    if isinstance(value, (list, tuple)) and len(value) == 1:  # options that accept several values
        value = value[0]
    if value is None:
        return None
    if field in FLOATS and type(value) is int:
        value = float(value)
    kind, what = (float, "number") if field in FLOATS else (int, "whole number")
    least = "0 or more" if field in _MAY_BE_ZERO else "above 0"
    if type(value) is not kind or not 0 <= value < math.inf or (value == 0 and field not in _MAY_BE_ZERO):
        raise ValueError(f"{argument}={value!r} is not a {what} {least}")
    return value


def _argument_defaults(values: dict[str, Any], fields: dict[str, Any], kinds: str) -> dict[str, Any]:
    """Return Megatron's defaults for arguments that were not given."""
    result: dict[str, Any] = {}
    if fields["mamba_chunk_size"] is None:
        result["mamba_chunk_size"] = _CHUNK
    if fields["mamba_num_heads"] is None and fields["hidden_size"] and fields["mamba_head_dim"]:
        heads, rest = divmod(2 * fields["hidden_size"], fields["mamba_head_dim"])
        if rest:
            raise ValueError(
                f"no mamba_num_heads, and 2 * hidden_size={2 * fields['hidden_size']} is not "
                f"divisible by mamba_head_dim={fields['mamba_head_dim']}"
            )
        result["mamba_num_heads"] = heads
    width = _stored_number(values, "ffn_hidden_size")
    if "-" in kinds:
        if width is None:
            raise ValueError("the stored arguments have no ffn_hidden_size, which - layers need")
        result["dense_ffn_hidden_size"] = width
    if "E" in kinds:
        if fields["moe_ffn_hidden_size"] is None:
            result["moe_ffn_hidden_size"] = width
        if fields["moe_router_topk_scaling_factor"] is None:
            result["moe_router_topk_scaling_factor"] = 1.0
    return result


def _vocabulary_size(values: dict[str, Any], given: int | None) -> int:
    padded = _stored_number(values, "padded_vocab_size")
    size = given or _stored_number(values, "vocab_size")
    if size is None:
        raise ValueError(
            f"the stored arguments do not contain the vocabulary size, only "
            f"padded_vocab_size={padded}: give vocab_size (--vocab-size N)"
        )
    if padded is not None and size > padded:
        raise ValueError(f"vocab_size={size} is more than padded_vocab_size={padded}")
    return int(size)
