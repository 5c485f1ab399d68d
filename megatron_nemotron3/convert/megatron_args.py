"""A model as the arguments Megatron stores in its checkpoints, both ways. Standard library only.

Megatron keeps its command line's `argparse.Namespace` in every checkpoint. `--use-checkpoint-args` takes the
model from it, a resumed run compares some of it, and here it says which model a folder holds. It is written
as the flags of `nemotron3 flags` would have made it, but for what is a run's own choice: --spec, grouped
GEMM, tokenizer. Names changed over time; each row of the tables below has the present name first.
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from megatron_nemotron3.checkpoint.unpickle import Inert
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as patterns
from megatron_nemotron3.models.config import MAMBA_CONV_KERNEL

#: Configuration field -> names in the arguments.
_MODEL = {
    "hidden_size": ("hidden_size",),
    "seq_length": ("seq_length",),
    "max_position_embeddings": ("max_position_embeddings",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_query_groups",),
    "kv_channels": ("kv_channels",),
    "mamba_num_heads": ("mamba_num_heads",),
    "mamba_head_dim": ("mamba_head_dim",),
    "mamba_state_dim": ("mamba_state_dim",),
    "mamba_num_groups": ("mamba_num_groups",),
    # Not an option of Megatron's, which always takes 128; it changes no tensor and no result.
    "mamba_chunk_size": ("mamba_chunk_size",),
    "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
    "init_method_std": ("init_method_std",),
}
_MOE = {
    "num_moe_experts": ("num_experts", "num_moe_experts"),
    "moe_router_topk": ("moe_router_topk",),
    "moe_ffn_hidden_size": ("moe_ffn_hidden_size",),
    "moe_shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size",),
    "moe_latent_size": ("moe_latent_size",),
    "moe_router_topk_scaling_factor": ("moe_router_topk_scaling_factor",),
    "moe_aux_loss_coeff": ("moe_aux_loss_coeff",),
    "moe_router_bias_update_rate": ("moe_router_bias_update_rate",),
}
_FLOATS = frozenset(
    (
        *("layernorm_epsilon", "init_method_std", "moe_router_topk_scaling_factor", "moe_aux_loss_coeff"),
        *("moe_router_bias_update_rate", "mtp_loss_scaling_factor"),
    )
)
#: What changes no tensor. Every run stores them; where they lack, the default stands.
_TRAINING = frozenset(
    (
        *("seq_length", "max_position_embeddings", "layernorm_epsilon", "init_method_std"),
        *("moe_aux_loss_coeff", "moe_router_bias_update_rate"),
    )
)
_INIT_STD = 0.02  # the default of --init-method-std
#: 0 turns these off.
_MAY_BE_ZERO = frozenset(("moe_aux_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor"))

#: What makes a hybrid model a Nemotron-H one: argument -> (value, what another value would mean). Arguments a
#: version lacks are taken to be as here.
_FAMILY: dict[str, tuple[Any, str]] = {
    "group_query_attention": (True, "attention without query groups"),
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
#: Options of Megatron's that no published model uses and that add tensors or change results.
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
    """The arguments to store with a model's weights; Megatron 0.16 to 0.19 read the model from them.

    They say that there is no optimizer and no random state in the checkpoint, and nothing of `--spec`:
    whichever spec a run names, stock or ours, loads the weights.

    Args:
        padded_vocab_size: rows of the stored embedding.
        dtype: of the weights: "bfloat16", "float16" or "float32".

    Raises:
        ValueError: another dtype, padding to less than the vocabulary, or a model Megatron cannot build.
    """
    if dtype not in _PRECISIONS:
        raise ValueError(f"{config.name}: Megatron trains in {', '.join(_PRECISIONS)}, not in {dtype}")
    if padded_vocab_size < config.vocab_size:
        raise ValueError(f"padded_vocab_size={padded_vocab_size} is less than vocab_size={config.vocab_size}")
    if config.mamba_conv_kernel != MAMBA_CONV_KERNEL and "M" in config.full_pattern:
        raise ValueError(
            f"{config.name}: mamba_conv_kernel={config.mamba_conv_kernel}: Megatron builds Mamba-2 with "
            f"{MAMBA_CONV_KERNEL} only"
        )
    values: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hybrid_layer_pattern": config.full_pattern,
        # 0.16 knows the older name, and no MTP in it; from 0.17 on the newer name counts.
        "hybrid_override_pattern": config.pattern,
        "is_hybrid_model": True,
        "ffn_hidden_size": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "add_position_embedding": True,  # the option's default, compared on resuming; type "none" wins
        "mtp_num_layers": config.mtp_num_layers or None,
    }
    tables = [(_MODEL, _FAMILY)] + [(_MOE, _MOE_FAMILY)] * config.is_moe
    for fields, family in tables:
        values |= {names[0]: getattr(config, field) for field, names in fields.items()}
        values |= {name: value for name, (value, _) in family.items()}
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
    """What a checkpoint holds beside its tensors: for common.pt, and in a list for the `common_state` object.

    The iteration is 0, as of weights to start from. `content_metadata` says that experts are stacked.
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
    """The model that stored arguments describe.

    Args:
        args: "args" of a checkpoint's common state, read by Megatron or by `read.common_state`.
        name: of the result, and for messages.
        vocab_size: rows of the embedding without padding. Arguments know it only where `--vocab-size` was
            given (up to 0.17 NullTokenizer makes it one more); a tokenizer's is nowhere stored.

    Raises:
        ValueError: the model is not of this family (the message lists every argument that says so), a value
            is missing or impossible, or the vocabulary is unknown.
    """
    values = args.state if isinstance(args, Inert) else vars(args)
    if not isinstance(values, dict):
        raise ValueError(f"{name}: the stored arguments are a {type(values).__name__}, not named values")
    pattern = _pattern(name, values)
    kinds = pattern.main + (pattern.mtp_pattern or "")
    _check_family(name, values, "E" in kinds)
    fields = {field: _number(name, values, field, names) for field, names in _MODEL.items()}
    if values.get("group_query_attention") is False:
        fields["num_query_groups"] = fields["num_attention_heads"]
    if "E" in kinds:
        fields |= {field: _number(name, values, field, names) for field, names in _MOE.items()}
    fields |= _defaults(name, values, fields, kinds)
    fields = {field: value for field, value in fields.items() if value is not None or field not in _TRAINING}
    fields.setdefault("init_method_std", _INIT_STD)
    missing = [
        names[0]
        for field, names in (_MODEL | (_MOE if "E" in kinds else {})).items()
        if fields.get(field, 0) is None and field != "moe_latent_size"
    ]
    if missing:
        raise ValueError(f"{name}: the stored arguments have no {', '.join(missing)}")
    if pattern.mtp:
        factor = _number(name, values, "mtp_loss_scaling_factor", ("mtp_loss_scaling_factor",))
        fields["mtp_use_repeated_layer"] = bool(values.get("mtp_use_repeated_layer"))
        fields |= {} if factor is None else {"mtp_loss_scaling_factor": factor}
    return Nemotron3Config(
        name=name,
        title=name,
        pattern=pattern.main,
        mtp_pattern=pattern.mtp_pattern,
        mtp_num_layers=pattern.mtp_num_layers,
        vocab_size=_vocabulary(name, values, vocab_size),
        **fields,
    )


def _pattern(name: str, values: dict[str, Any]) -> patterns.HybridPattern:
    """From hybrid_layer_pattern, or from the two names of 0.16 and before."""
    text = values.get("hybrid_layer_pattern") or values.get("hybrid_override_pattern")
    if not isinstance(text, str):
        raise ValueError(
            f"{name}: the stored arguments have no hybrid_layer_pattern and no hybrid_override_pattern: "
            "it is no hybrid model, or its layers came from ratios"
        )
    mtp, depths = values.get("mtp_hybrid_override_pattern"), values.get("mtp_num_layers") or 0
    if isinstance(mtp, str) and type(depths) is int and patterns.MTP_SEPARATOR not in text:
        text += f"{patterns.MTP_SEPARATOR}{mtp}" * depths
    try:
        return patterns.parse(text)
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None


def _check_family(name: str, values: dict[str, Any], moe: bool) -> None:
    family = {**_FAMILY, **(_MOE_FAMILY if moe else {})}
    wrong = [
        f"{argument}={values[argument]!r} ({meaning})"
        for argument, (value, meaning) in family.items()
        if meaning
        and argument != "group_query_attention"
        and values.get(argument, value) not in (value, None)
    ]
    wrong += [
        f"{argument}={values[argument]!r} ({what})"
        for argument, what in _ABSENT.items()
        if values.get(argument)
    ]
    groups = values.get("moe_router_num_groups")
    if moe and groups not in (None, 1):
        wrong.append(f"moe_router_num_groups={groups!r} (experts chosen by groups)")
    if wrong:
        raise ValueError(f"{name}: not a Nemotron-H model, whose family has none of: " + ", ".join(wrong))


def _number(name: str, values: dict[str, Any], field: str, names: tuple[str, ...]) -> Any:
    """The first of the names that has a value; None if none has."""
    argument = next((n for n in names if values.get(n) is not None), names[0])
    value = values.get(argument)
    if isinstance(value, (list, tuple)) and len(value) == 1:  # options that take one value or several
        value = value[0]
    if value is None:
        return None
    if field in _FLOATS and type(value) is int:
        value = float(value)
    kind, what = (float, "number") if field in _FLOATS else (int, "whole number")
    least = "0 or more" if field in _MAY_BE_ZERO else "above 0"
    if type(value) is not kind or not 0 <= value < math.inf or (value == 0 and field not in _MAY_BE_ZERO):
        raise ValueError(f"{name}: {argument}={value!r} is no {what} {least}")
    return value


def _defaults(name: str, values: dict[str, Any], fields: dict[str, Any], kinds: str) -> dict[str, Any]:
    """What Megatron makes of arguments that were not given."""
    result: dict[str, Any] = {}
    if fields["mamba_chunk_size"] is None:
        result["mamba_chunk_size"] = _CHUNK
    if fields["mamba_num_heads"] is None and fields["hidden_size"] and fields["mamba_head_dim"]:
        heads, rest = divmod(2 * fields["hidden_size"], fields["mamba_head_dim"])
        if rest:
            raise ValueError(
                f"{name}: no mamba_num_heads, and 2 * hidden_size={2 * fields['hidden_size']} is not "
                f"divisible by mamba_head_dim={fields['mamba_head_dim']}"
            )
        result["mamba_num_heads"] = heads
    width = _number(name, values, "ffn_hidden_size", ("ffn_hidden_size",))
    if "-" in kinds:
        if width is None:
            raise ValueError(f"{name}: the stored arguments have no ffn_hidden_size, and there are - layers")
        result["dense_ffn_hidden_size"] = width
    if "E" in kinds:
        if fields["moe_ffn_hidden_size"] is None:
            result["moe_ffn_hidden_size"] = width
        if fields["moe_router_topk_scaling_factor"] is None:
            result["moe_router_topk_scaling_factor"] = 1.0
    return result


def _vocabulary(name: str, values: dict[str, Any], given: int | None) -> int:
    padded = _number(name, values, "padded_vocab_size", ("padded_vocab_size",))
    size = given or _number(name, values, "vocab_size", ("vocab_size",))
    if size is None:
        raise ValueError(
            f"{name}: the stored arguments do not say how large the vocabulary is, only "
            f"padded_vocab_size={padded}: give vocab_size (--vocab-size N)"
        )
    if padded is not None and size > padded:
        raise ValueError(f"{name}: vocab_size={size} is more than padded_vocab_size={padded}")
    return int(size)
