"""One model for our config, Megatron and transformers: configs, modules, and tensor names of all three.

The names are taken from the module trees of the two models, not from the converter's tables, so that they can
check those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config

BLOCK_TYPES = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}

_LAYER = r"decoder\.layers\.(\d+)\."
#: Megatron name -> transformers name, for tensors that are the same on both sides.
SAME = {
    r"embedding\.word_embeddings\.weight": "model.embeddings.weight",
    r"decoder\.final_norm\.weight": "model.norm_f.weight",
    r"output_layer\.weight": "lm_head.weight",
    _LAYER
    + r"(?:mixer\.in_proj|self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_weight": "L.norm.weight",
    _LAYER + r"pre_mlp_layernorm\.weight": "L.norm.weight",
    _LAYER + r"mixer\.conv1d_(weight|bias)": "L.mixer.conv1d.#",
    _LAYER + r"mixer\.((?:in_proj|out_proj|norm)\.weight|A_log|D|dt_bias)": "L.mixer.#",
    _LAYER + r"self_attention\.linear_proj\.weight": "L.mixer.o_proj.weight",
    _LAYER + r"mlp\.router\.weight": "L.mixer.gate.weight",
    _LAYER + r"mlp\.router\.expert_bias": "L.mixer.gate.e_score_correction_bias",
    _LAYER + r"mlp\.(fc[12]_latent_proj\.weight)": "L.mixer.#",
    _LAYER + r"mlp\.shared_experts\.linear_fc1\.weight": "L.mixer.shared_experts.up_proj.weight",
    _LAYER + r"mlp\.shared_experts\.linear_fc2\.weight": "L.mixer.shared_experts.down_proj.weight",
    _LAYER + r"mlp\.linear_fc1\.weight": "L.mixer.up_proj.weight",
    _LAYER + r"mlp\.linear_fc2\.weight": "L.mixer.down_proj.weight",
}
_QKV = re.compile(_LAYER + r"self_attention\.linear_qkv\.weight")
_EXPERT = re.compile(_LAYER + r"mlp\.experts\.linear_fc([12])\.weight(\d+)")


def transformer_config(model: Nemotron3Config, **changes: Any) -> Any:
    """Megatron's `TransformerConfig` of a model in FP32, without options that need a GPU."""
    from megatron.core.activations import squared_relu
    from megatron.core.transformer.transformer_config import TransformerConfig

    shared = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "mamba_num_heads mamba_head_dim mamba_state_dim mamba_num_groups layernorm_epsilon init_method_std"
    )
    moe = (
        "num_moe_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "moe_latent_size moe_router_topk_scaling_factor moe_aux_loss_coeff moe_router_bias_update_rate"
    )
    mtp = "mtp_num_layers mtp_use_repeated_layer mtp_loss_scaling_factor"
    names = f"{shared} {moe if model.is_moe else ''} {mtp if model.has_mtp else ''}".split()
    values: dict[str, Any] = {name: getattr(model, name) for name in names}
    values |= {
        "activation_func": squared_relu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "is_hybrid_model": True,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
    }
    if model.is_moe:
        values |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
        }
    config = TransformerConfig(**(values | changes))
    if model.moe_use_norm_before_up_proj:  # no field of megatron-core 0.19
        config.moe_use_norm_before_up_proj = True
    return config


def megatron_model(model: Nemotron3Config, pattern: str | None = None, **changes: Any) -> Any:
    """Stock `HybridModel` with our torch stack; `changes` go to its `TransformerConfig`.

    Args:
        pattern: instead of the model's.
    """
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_nemotron3.specs import stack_spec

    return HybridModel(
        config=transformer_config(model, **changes),
        hybrid_stack_spec=stack_spec("torch", model),
        vocab_size=model.vocab_size,
        max_sequence_length=model.seq_length,
        hybrid_layer_pattern=pattern or model.full_pattern,
    )


def transformers_config(model: Nemotron3Config) -> Any:
    """`NemotronHConfig` of a model, MTP left out (transformers never builds it)."""
    from transformers import NemotronHConfig

    moe = {
        "n_routed_experts": model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_latent_size": model.moe_latent_size,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor,
    }
    return NemotronHConfig(
        layers_block_type=[BLOCK_TYPES[kind] for kind in model.pattern],
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        intermediate_size=model.ffn_hidden_size,
        mamba_num_heads=model.mamba_num_heads,
        mamba_head_dim=model.mamba_head_dim,
        ssm_state_size=model.mamba_state_dim,
        n_groups=model.mamba_num_groups,
        conv_kernel=model.mamba_conv_kernel,
        chunk_size=model.mamba_chunk_size,
        layer_norm_epsilon=model.layernorm_epsilon,
        max_position_embeddings=model.max_position_embeddings,
        use_cache=False,
        **(moe if model.is_moe else {}),
    )


def transformers_model(model: Nemotron3Config, **settings: Any) -> Any:
    """`NemotronHForCausalLM` of a model, MTP left out; `settings` are attributes of its config.

    transformers has no class for experts that differ by layer. Its own mixture of experts, built once for
    each layer from the config of that layer, is that model.
    """
    import transformers
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    def configured(of: Nemotron3Config) -> Any:
        config = transformers_config(of)
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    result = transformers.NemotronHForCausalLM(configured(model))
    for number, kind in enumerate(model.pattern if model.moe_layers else ""):
        if kind == "E":
            result.model.layers[number].mixer = NemotronHMoE(configured(model.at(number)), layer_idx=number)
    return result


def transformers_from(data: dict[str, Any]) -> Any:
    """`NemotronHForCausalLM` of a config.json.

    What the block of a layer states replaces what is outside, as in NVIDIA's class, which transformers lacks.
    """
    import transformers
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    def configured(of: dict[str, Any]) -> Any:
        config = transformers.NemotronHConfig.from_dict(of)
        config._attn_implementation = config._experts_implementation = "eager"
        return config

    result = transformers.NemotronHForCausalLM(configured(data))
    for number, block in enumerate(data.get("block_configs", ())):
        if block["block_type"] == "moe":
            result.model.layers[number].mixer = NemotronHMoE(configured(data | block), layer_idx=number)
    return result


def unclamped(model: Any) -> Any:
    """A model of transformers whose Mamba mixers limit no time step, as Megatron's."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    return model


def to_transformers(tensors: dict[str, Tensor], model: Nemotron3Config) -> dict[str, Tensor]:
    """Megatron's named tensors (parameters, or their gradients) under transformers' names and shapes.

    Raises:
        ValueError: a name no rule knows, or two tensors that claim the same place.
    """
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}

    def put(table: dict[Any, Tensor], key: Any, tensor: Tensor, source: str) -> None:
        if key in table:
            raise ValueError(f"{source}: {key} is already taken")
        table[key] = tensor

    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            layer, fc, expert = match.groups()
            stacked = f"model.layers.{layer}.mixer.experts.{'up' if fc == '1' else 'down'}_proj"
            put(experts.setdefault(stacked, {}), int(expert), tensor, name)
        elif match := _QKV.fullmatch(name):
            for part, rows in _split_qkv(tensor, model):
                put(result, f"model.layers.{match[1]}.mixer.{part}_proj.weight", rows, name)
        else:
            put(result, _same(name), tensor, name)
    for name, parts in experts.items():
        put(result, name, torch.stack([parts[e] for e in range(len(parts))]), name)
    return result


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face checkpoint tensors as transformers' module holds them: a layer's experts in one tensor."""
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        name = name.replace("backbone.", "model.")
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(up|down)_proj\.weight", name):
            experts.setdefault(f"{match[1]}.{match[3]}_proj", {})[int(match[2])] = tensor
        else:
            result[name] = tensor
    return result | {n: torch.stack([parts[e] for e in range(len(parts))]) for n, parts in experts.items()}


def _same(name: str) -> str:
    targets = [(m, to) for pattern, to in SAME.items() if (m := re.fullmatch(pattern, name))]
    if len(targets) != 1:
        raise ValueError(f"{name}: {len(targets)} rules match, expected one")
    match, target = targets[0]
    groups = match.groups()
    target = re.sub(r"^L\.", f"model.layers.{groups[0] if groups else ''}.", target)
    return target.replace("#", groups[-1] if groups else "")


def _split_qkv(weight: Tensor, model: Nemotron3Config) -> Iterator[tuple[str, Tensor]]:
    """Rows [q ... q, k, v] of each KV group -> q, k and v of all groups."""
    groups, c = model.num_query_groups, model.kv_channels
    queries = model.num_attention_heads // groups
    blocks = weight.view(groups, queries + 2, c, -1)
    for part, rows in (("q", blocks[:, :queries]), ("k", blocks[:, -2]), ("v", blocks[:, -1])):
        yield part, rows.reshape(-1, weight.shape[-1])


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Change everything that initialization sets to 0 or 1, so that a missing factor shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, mean: float, std: float) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("expert_bias"):
            normal(tensor, 0.0, 0.1)
        elif name.endswith("dt_bias"):
            normal(tensor, -3.0, 1.5)
        elif name.endswith("A_log"):
            normal(tensor, 1.0, 1.0)
        elif re.search(r"conv1d_(weight|bias)$", name):
            normal(tensor, 0.0, 0.4)
        elif name.endswith("layer_norm_weight") or re.search(r"norm\.weight$", name) or name.endswith(".D"):
            normal(tensor, 1.0, 0.3)
        elif tensor.is_floating_point() and tensor.dim() == 2:
            normal(tensor, 0.0, tensor.shape[1] ** -0.5)
