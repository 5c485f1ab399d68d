"""The output of `nemotron3 show NAME`: a model's numbers as text (`render`) and as data (`describe`)."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig, sizes
from megatron_nemotron3.models.omni_tensors import count_parts, released_tensors, tensors_by_part
from megatron_nemotron3.models.parameters import count, decoder_layers, layer_parameters, stored_tensors

#: Columns `render` stays within.
WIDTH = 100
_LABEL = 34

# Heading -> the fields of the config below it, each with its label. Fields that are None are left out.
_SIZES: dict[str, dict[str, str]] = {
    "model": {
        "hidden_size": "hidden size",
        "vocab_size": "vocabulary",
        "seq_length": "training sequence length",
        "max_position_embeddings": "longest position",
        "init_method_std": "initialization std",
        "layernorm_epsilon": "RMSNorm epsilon",
    },
    "attention (*)": {
        "num_attention_heads": "query heads",
        "num_query_groups": "KV heads",
        "kv_channels": "head dimension",
    },
    "Mamba-2 (M)": {
        "mamba_num_heads": "heads",
        "mamba_head_dim": "head dimension",
        "mamba_state_dim": "state size",
        "mamba_num_groups": "groups",
        "mamba_conv_kernel": "convolution kernel",
        "mamba_chunk_size": "scan chunk",
    },
    "dense MLP (-)": {"dense_ffn_hidden_size": "FFN size"},
    "mixture of experts (E)": {
        "num_moe_experts": "routed experts",
        "moe_router_topk": "experts per token",
        "moe_ffn_hidden_size": "expert FFN size",
        "moe_shared_expert_intermediate_size": "shared expert FFN size",
        "moe_layers": "experts by layer",
        "moe_latent_size": "latent size",
        "moe_use_norm_before_up_proj": "norm of the latent width",
        "moe_router_topk_scaling_factor": "routed scaling factor",
    },
    "multi-token prediction": {
        "mtp_pattern": "layers of one block",
        "mtp_num_layers": "depths in training",
        "mtp_num_blocks": "blocks stored",
        "mtp_loss_scaling_factor": "loss scaling factor",
    },
}
_HEADINGS = {"M": "Mamba-2 (M)", "*": "attention (*)", "E": "mixture of experts (E)", "-": "dense MLP (-)"}
_PARTS = {"embedding": "embedding", "output_layer": "output layer", "final_norm": "final norm", "mtp": "MTP"}


def _model_sizes(config: Nemotron3Config) -> dict[str, dict[str, Any]]:
    """Heading -> field -> value, of the parts that the model has."""
    layers = config.pattern + (config.mtp_pattern or "")
    absent = {heading for kind, heading in _HEADINGS.items() if kind not in layers}
    if not config.has_mtp:
        absent.add("multi-token prediction")
    return {
        heading: {field: value for field in rows if (value := getattr(config, field)) not in (None, False)}
        for heading, rows in _SIZES.items()
        if heading not in absent
    }


def _parameters_each(config: Nemotron3Config, kind: str) -> int | list[int]:
    """Parameters of a layer; the fewest and the most where the layers differ."""
    each = {layer_parameters(at, kind) for other, at, _ in decoder_layers(config) if other == kind}
    return [min(each), max(each)] if len(each) > 1 else each.pop()


def _parameter_facts(config: Nemotron3Config, mtp: bool) -> dict[str, int]:
    number = count(config, mtp=mtp)
    return {
        "stored": number.stored,
        "trainable": number.trainable,
        "expert_bias": number.expert_bias,
        "bytes_bf16": number.stored_bytes,
        "tensors": stored_tensors(config, mtp=mtp),
    }


def describe(config: Nemotron3Config) -> dict[str, Any]:
    """Everything `render` shows, ready for `json.dumps`. Sizes carry the config's field names.

    `config` holds the fields themselves; a file of this text is accepted wherever a model is named.
    `parameters.checkpoint` counts what a released checkpoint stores, MTP blocks included;
    `parameters.without_mtp` counts the decoder alone. Both are equal for a model without MTP.
    """
    whole = count(config)
    layers = {kind: number for kind, number in _pattern.count(config.pattern).items() if number}
    facts = {
        "name": config.name,
        "title": config.title,
        "pattern": config.pattern,
        "hybrid_layer_pattern": config.full_pattern,
        "num_layers": config.num_layers,
        "layers": {
            _pattern.KINDS[kind]: {
                "symbol": kind,
                "layers": number,
                "parameters_each": _parameters_each(config, kind),
                "parameters": whole.layers[kind],
            }
            for kind, number in layers.items()
        },
        "sizes": _model_sizes(config),
        "parameters": {
            "checkpoint": _parameter_facts(config, mtp=True),
            "without_mtp": _parameter_facts(config, mtp=False),
            **{part: getattr(whole, part) for part in _PARTS},
        },
        "active_parameters": whole.active,
        "published": {"total": config.published_total, "active": config.published_active},
        "source": config.source,
        "config": vars(config),
    }
    read: dict[str, Any] = json.loads(json.dumps(facts))  # tuples become lists
    return read


def describe_omni(model: OmniConfig) -> dict[str, Any]:
    """Everything `render_omni` shows, ready for `json.dumps`; the language model as `describe` has it."""
    parts = count_parts(model)
    return {
        "name": model.name,
        "title": model.title,
        "parameters": parts,
        "total": sum(parts.values()),
        "tensors": released_tensors(model),
        "tensors_by_part": tensors_by_part(model),
        **sizes(model),
        "published": {"total": model.published_total},
        "source": model.source,
        "language": describe(model.language),
    }


def render_omni(model: OmniConfig) -> str:
    """A model with encoders as a plain-text table of at most `WIDTH` columns."""
    facts = describe_omni(model)
    tensors = facts["tensors_by_part"]
    lines = [model.title, "=" * len(model.title), "", f"{'part':<24}{'parameters':>20}{'stored tensors':>18}"]
    for part in tensors:
        lines.append(f"  {part:<22}{facts['parameters'].get(part, 0):>20,}{tensors[part]:>18,}")
    lines.append(f"  {'sum':<22}{facts['total']:>20,}{facts['tensors']:>18,}")
    headings = {
        "vision": "vision encoder (RADIO)",
        "sound": "sound encoder (Parakeet)",
        "token_ids": "token ids",
    }
    for part, heading in headings.items():
        lines += ["", heading] if part in facts else []
        for name, value in facts.get(part, {}).items():
            lines.append(f"  {name.replace('_', ' '):<22}{_number(value):>12}")
    lines += ["", f"language model: {model.language.title}: nemotron3 show {model.language.name}", ""]
    lines += _labeled_text("published", model.published_total or "UNKNOWN")
    lines += _labeled_text("source", model.source or "UNKNOWN")
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _sizes_lines(config: Nemotron3Config, rows: dict[str, str]) -> list[str]:
    lines = []
    for field, label in rows.items():
        value = getattr(config, field)
        if field == "moe_layers" and value:
            text = ", ".join(f"{width}/{topk}" for width, topk in value)
            lines += [f"  {'expert FFN size / experts per token of each layer':<{_LABEL}}"]
            lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
        elif config.moe_layers and field in ("moe_router_topk", "moe_ffn_hidden_size"):
            lines += [_labeled_number(f"{label}, MTP", value)] if config.has_mtp else []
        elif value not in (None, False):
            lines.append(_labeled_number(label, value))
    return lines


def _labeled_number(label: str, value: Any) -> str:
    return f"  {label:<{_LABEL}}{_number(value):>24}"


def _labeled_text(label: str, text: str) -> list[str]:
    """A label and a text of any length, wrapped also where it has no blanks, as in a pattern."""
    indent = " " * 11
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{label:<11}", subsequent_indent=indent, break_on_hyphens=False
    )


def render(config: Nemotron3Config) -> str:
    """The model's numbers as a plain-text table of at most `WIDTH` columns."""
    facts = describe(config)
    lines = [config.title, "=" * len(config.title), ""]
    lines += _labeled_text("pattern", facts["hybrid_layer_pattern"])
    lines += ["", f"{'layers':<14}{'number':>8}{'parameters each':>22}{'parameters':>22}"]
    for name, layer in facts["layers"].items():
        number, each, total = layer["layers"], layer["parameters_each"], layer["parameters"]
        least, *most = each if isinstance(each, list) else [each]
        lines.append(f"  {layer['symbol']} {name:<10}{number:>8,}{least:>22,}{total:>22,}")
        lines += [f"  {'':<12}{'':>8}{f'to {size:,}':>22}" for size in most]
    in_layers = sum(layer["parameters"] for layer in facts["layers"].values())
    lines.append(f"  {'sum':<12}{facts['num_layers']:>8,}{'':>22}{in_layers:>22,}")
    for heading, rows in _SIZES.items():
        if heading in facts["sizes"]:
            lines += ["", heading, *_sizes_lines(config, rows)]
    parameters = facts["parameters"]
    lines += ["", "parameters"]
    checkpoint = parameters["checkpoint"]
    for part, label in _PARTS.items():
        if parameters[part]:
            lines.append(_labeled_number(label, parameters[part]))
    lines.append(_labeled_number("stored in a checkpoint", checkpoint["stored"]))
    if config.has_mtp:
        lines.append(_labeled_number("  of it without MTP", parameters["without_mtp"]["stored"]))
    lines.append(_labeled_number("trainable", checkpoint["trainable"]))
    if checkpoint["expert_bias"]:
        lines.append(_labeled_number("expert bias (FP32, not trained)", checkpoint["expert_bias"]))
    lines.append(_labeled_number("checkpoint tensors", checkpoint["tensors"]))
    lines.append(_labeled_number("checkpoint bytes in BF16", checkpoint["bytes_bf16"]))
    lines += ["", "active parameters per token, without MTP"]
    for name, value in facts["active_parameters"].items():
        lines.append(_labeled_number(name.replace("_", " "), value))
    lines.append("")
    published = [f"{key} {value}" for key, value in facts["published"].items() if value]
    lines += _labeled_text("published", "; ".join(published) or "UNKNOWN")
    lines += _labeled_text("source", facts["source"] or "UNKNOWN")
    return "\n".join(lines)
