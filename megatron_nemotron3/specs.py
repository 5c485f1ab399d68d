"""Targets of `--spec megatron_nemotron3.specs …`. They compose the layers of `layers/`.

    nemotron3_stack_spec        TransformerEngine (TE) if it is installed and there is a GPU, else plain torch
    nemotron3_torch_stack_spec  plain torch, on CPU and GPU
    nemotron3_te_stack_spec     TE; building the model fails without it

The specs are plain module attributes, because Megatron reads `vars(module)[name]`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_nemotron3.layers.backend import TORCH, Backend, default_backend, te_problem
from megatron_nemotron3.layers.latent_moe import CountingRouter
from megatron_nemotron3.layers.mtp import MTPLayer
from megatron_nemotron3.layers.stack import Nemotron3Stack, Nemotron3StackSubmodules


def mtp_block_spec(norm: Any, column_parallel_linear: Any) -> ModuleSpec:
    """Norms and projection of the MTP block. Its layers come from the pattern and the stack's specs."""
    layer = ModuleSpec(
        module=MTPLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=column_parallel_linear, mtp_model_layer=None, layer_norm=norm
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )


def stack_spec(backend: Backend) -> ModuleSpec:
    """Compose the stack (layers M, *, -, E and MTP) from the builders of a backend."""
    mamba = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            mixer=ModuleSpec(
                module=backend.mixer,
                submodules=MambaMixerSubmodules(
                    in_proj=backend.norm_column_parallel_linear, out_proj=backend.row_parallel_linear
                ),
            ),
            mamba_bda=get_bias_dropout_add,
        ),
    )
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.norm_column_parallel_linear,
                    core_attention=backend.core_attention,
                    linear_proj=backend.row_parallel_linear,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
        ),
    )
    dense = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=backend.norm_column_parallel_linear, linear_fc2=backend.row_parallel_linear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    shared_experts = partial(
        SharedExpertMLP,
        submodules=MLPSubmodules(
            linear_fc1=backend.column_parallel_linear, linear_fc2=backend.row_parallel_linear
        ),
    )
    moe = ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=backend.norm,
            mlp=partial(
                backend.moe_layer,
                submodules=MoESubmodules(
                    experts=backend.experts, shared_experts=shared_experts, router=backend.router
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return ModuleSpec(
        module=Nemotron3Stack,
        submodules=Nemotron3StackSubmodules(
            mamba_layer=mamba,
            attention_layer=attention,
            mlp_layer=dense,
            moe_layer=moe,
            mtp_block_spec=mtp_block_spec(backend.norm, backend.column_parallel_linear),
            final_norm=backend.norm,
            description=backend.describe(),
        ),
    )


def _counting(moe_layer: ModuleSpec) -> ModuleSpec:
    """Upstream's MoE layer with our router, which counts right in BF16 and with padding tokens."""
    build = moe_layer.submodules.mlp
    moe = replace(build.keywords["submodules"], router=CountingRouter)
    submodules = replace(
        moe_layer.submodules, mlp=partial(build.func, **{**build.keywords, "submodules": moe})
    )
    return replace(moe_layer, submodules=submodules)


def te_stack_spec() -> ModuleSpec:
    """Upstream's TE layers in our stack, with our router and MTP layer."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    stock = {f.name: getattr(hybrid_stack_spec.submodules, f.name) for f in fields(HybridStackSubmodules)}
    stock["mtp_block_spec"] = mtp_block_spec(TENorm, TEColumnParallelLinear)
    stock["moe_layer"] = _counting(stock["moe_layer"])
    return ModuleSpec(
        module=Nemotron3Stack,
        submodules=Nemotron3StackSubmodules(
            **stock,
            final_norm=TENorm,
            description="backend te: scan mamba-ssm; all else TransformerEngine",
        ),
    )


class TransformerEngineMissing:
    """Replaces the TE stack if TE is absent: building the model fails with the reason."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError(f"--spec megatron_nemotron3.specs nemotron3_te_stack_spec: {te_problem()}")


nemotron3_torch_stack_spec = stack_spec(TORCH)
nemotron3_te_stack_spec = (
    te_stack_spec()
    if te_problem() is None
    else ModuleSpec(module=TransformerEngineMissing, submodules=nemotron3_torch_stack_spec.submodules)
)
nemotron3_stack_spec = nemotron3_te_stack_spec if default_backend() == "te" else nemotron3_torch_stack_spec
