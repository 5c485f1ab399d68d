"""Targets of `--spec megatron_nemotron3.specs …`. They compose the layers of `layers/`.

    nemotron3_stack_spec        TransformerEngine (TE) if it is installed and there is a GPU, else plain torch
    nemotron3_torch_stack_spec  plain torch, on CPU and GPU
    nemotron3_te_stack_spec     TE; building the model fails without it

Models whose E layers have experts of different widths and top-k have their own, which build each layer from
its row of `Nemotron3Config.moe_layers`:

    nemotron3_puzzle_stack_spec, nemotron3_puzzle_torch_stack_spec, nemotron3_puzzle_te_stack_spec
    nemotron3_puzzle_tiny_stack_spec, …

The name of a model of one's own holds that table. `nemotron3 run`, `train` and `build_model` make the stack
of such a name by `named`:

    nemotron3_torch_stack_spec@ME*E@64:4,96:8

Another script needs a module of one's own, for `--spec my_module spec`:

    from megatron_nemotron3.specs import stack_spec
    spec = stack_spec("torch", config)

The specs are plain module attributes, because Megatron reads `vars(module)[name]`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from importlib import import_module
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

from megatron_nemotron3.checkpoints.convert.into_model import load_base
from megatron_nemotron3.common.switches import LORA
from megatron_nemotron3.layers.backend import TORCH, Backend, default_backend, te_problem
from megatron_nemotron3.layers.draws import seed_by_step
from megatron_nemotron3.layers.latent_moe import CountingRouter
from megatron_nemotron3.layers.lora import add_when_built
from megatron_nemotron3.layers.mtp import MTPLayer
from megatron_nemotron3.layers.stack import Nemotron3Stack, Nemotron3StackSubmodules
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.stack_specs import BACKENDS, MODULE, models_by_spec, named_table, spec_name
from megatron_nemotron3.precision.install import emulate_mtp, emulate_stack
from megatron_nemotron3.train.monitor.attach import watch_mtp, watch_stack
from megatron_nemotron3.train.monitor.losses import correct_losses
from megatron_nemotron3.train.monitor.not_finite import watch_not_finite

#: What is attached to a stack when it is built, in this order.
ATTACHED = (
    seed_by_step,
    emulate_stack,
    correct_losses,
    watch_stack,
    watch_not_finite,
    partial(add_when_built, load_base=partial(load_base, option=f"{LORA}: base=")),
)


def mtp_block_spec(norm: Any, column_parallel_linear: Any) -> ModuleSpec:
    """Norms and projection of the MTP block. Its layers come from the pattern and the stack's specs."""
    layer = ModuleSpec(
        module=MTPLayer,
        params={"when_built": (emulate_mtp, watch_mtp)},
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=column_parallel_linear, mtp_model_layer=None, layer_norm=norm
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )


def _composed(backend: Backend) -> ModuleSpec:
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
    linears = MLPSubmodules(
        linear_fc1=backend.norm_column_parallel_linear, linear_fc2=backend.row_parallel_linear
    )
    dense = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            mlp=partial(MLP.as_mlp_submodule, submodules=linears), mlp_bda=get_bias_dropout_add
        ),
    )
    shared_linears = replace(linears, linear_fc1=backend.column_parallel_linear)
    experts = MoESubmodules(
        experts=backend.experts,
        shared_experts=partial(SharedExpertMLP, submodules=shared_linears),
        router=backend.router,
    )
    moe = ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=backend.norm,
            mlp=partial(backend.moe_layer, submodules=experts),
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
            when_built=ATTACHED,
        ),
    )


def _with_counting_router(moe_layer: ModuleSpec) -> ModuleSpec:
    """Upstream's MoE layer with our router, which counts right in BF16 and with padding tokens."""
    build = moe_layer.submodules.mlp
    moe = replace(build.keywords["submodules"], router=CountingRouter)
    mlp = partial(build.func, **{**build.keywords, "submodules": moe})
    return replace(moe_layer, submodules=replace(moe_layer.submodules, mlp=mlp))


def _te() -> ModuleSpec:
    """Upstream's TE layers in our stack, with our router and MTP layer."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    stock = {f.name: getattr(hybrid_stack_spec.submodules, f.name) for f in fields(HybridStackSubmodules)}
    stock["mtp_block_spec"] = mtp_block_spec(TENorm, TEColumnParallelLinear)
    stock["moe_layer"] = _with_counting_router(stock["moe_layer"])
    return ModuleSpec(
        module=Nemotron3Stack,
        submodules=Nemotron3StackSubmodules(
            **stock,
            final_norm=TENorm,
            description="backend te: scan mamba-ssm; all else TransformerEngine",
            when_built=ATTACHED,
        ),
    )


class TransformerEngineMissing:
    """Replaces the TE stack if TE is absent: building the model fails with the reason."""

    def __init__(self, *args: Any, spec: str, **kwargs: Any) -> None:
        raise ImportError(f"--spec {MODULE} {spec}: {te_problem()}")


def _missing(name: str, model: Nemotron3Config | None = None) -> ModuleSpec:
    """A spec whose build fails; it has the parts of the torch backend, for callers that read them."""
    submodules = replace(nemotron3_torch_stack_spec.submodules, model=model)
    return ModuleSpec(module=TransformerEngineMissing, submodules=submodules, params={"spec": name})


nemotron3_torch_stack_spec = _composed(TORCH)
nemotron3_te_stack_spec = _te() if te_problem() is None else _missing(spec_name(None, "te"))
nemotron3_stack_spec = nemotron3_te_stack_spec if default_backend() == "te" else nemotron3_torch_stack_spec


def stack_spec(backend: str, config: Nemotron3Config | None = None) -> ModuleSpec:
    """Return our stack on a backend, with the experts that each layer of `config` has.

    Args:
        backend: "auto", "te" or "torch", as in the names above.
        config: a model with `moe_layers`. Building checks its layers and experts; other sizes are those of
            Megatron's options. None, or a model without `moe_layers`: all E layers have the experts of
            Megatron's options.

    Raises:
        ValueError: no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: use {', '.join(BACKENDS)}")
    spec: ModuleSpec = globals()[spec_name(None, backend)]
    if config is None or config.moe_layers is None:
        return spec
    if spec.module is TransformerEngineMissing:
        return _missing(spec_name(config, backend), config)
    return replace(spec, submodules=replace(spec.submodules, model=config))


def named(module: str, name: str) -> ModuleSpec | None:
    """Return the stack that the two values of `--spec` name, if it is one of ours, also in another module.

    From now on Megatron finds a stack whose name holds a table, too.

    Raises:
        ValueError: the module has no such object, or the table in the name is wrong.
        ImportError: the module cannot be imported.
    """
    objects = vars(import_module(module))
    if module == MODULE and name not in objects and (table := named_table(name)):
        objects[name] = stack_spec(*table)
    if name not in objects:
        known = [key for key, value in objects.items() if isinstance(value, ModuleSpec)]
        raise ValueError(f"unknown spec; use one of {', '.join(sorted(known))}")
    found = objects[name]
    ours = isinstance(found, ModuleSpec) and isinstance(found.submodules, Nemotron3StackSubmodules)
    return found if ours else None


def is_torch(spec: ModuleSpec | None) -> bool:
    """Whether a stack is built on the torch backend."""
    if spec is None or spec.module is not Nemotron3Stack:
        return False
    return bool(spec.submodules.mamba_layer is nemotron3_torch_stack_spec.submodules.mamba_layer)


globals().update({name: stack_spec(*of) for name, of in models_by_spec().items()})
