"""Build, convert and train Nemotron 3 inside Megatron-Bridge (docs/bridge.md).

    import megatron_nemotron3.bridge
    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider()

The import uses public hooks of Bridge:

* `AutoMapping` gets the split of our modules over tensor-parallel ranks;
* `Nemotron3Bridge` is registered for NemotronH, so that a provider builds our stack, MTP has the depth it was
  trained with, Mamba layers inside MTP are converted, and padding of the vocabulary is not exported;
* stack specs are functions, which Bridge stores in `run_config.yaml` by their import path, and this package
  is allowed in such files;
* `import megatron.bridge` succeeds without TransformerEngine (`cpu.bridge_imports`).

This is the only module that imports megatron.bridge.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import logging
import re
from pathlib import Path
from typing import Any, ClassVar

from megatron_nemotron3.cpu.bridge_imports import allow_missing_te

allow_missing_te()

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    MambaConv1dMapping,
    MambaInProjMapping,
    RowParallelMapping,
)
from megatron.bridge.models.hybrid.hybrid_builder import HybridModelBuilder, HybridModelConfig
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider, get_default_hybrid_stack_spec
from megatron.bridge.models.nemotronh.nemotron_h_bridge import NemotronHBridge
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.bridge.peft import lora
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import get_model_config

from megatron_nemotron3 import cpu, specs
from megatron_nemotron3.checkpoints.convert.block_configs import KEY as BLOCKS_KEY
from megatron_nemotron3.checkpoints.convert.block_configs import has_blocks
from megatron_nemotron3.checkpoints.convert.checkpoints import hf_model
from megatron_nemotron3.checkpoints.convert.config_json import MTP_BLOCKS, OWN, OWN_FIELDS
from megatron_nemotron3.cpu.megatron import ARGUMENTS
from megatron_nemotron3.layers.backend import default_backend, te_problem
from megatron_nemotron3.layers.experts import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from megatron_nemotron3.layers.latent_moe import CountingRouter
from megatron_nemotron3.layers.linear import DuplicatedLinear
from megatron_nemotron3.layers.lora import adapter_class
from megatron_nemotron3.layers.mamba import Mamba2Mixer
from megatron_nemotron3.models import lora as settings
from megatron_nemotron3.models.catalog import identify

logger = logging.getLogger(__name__)

#: Class of ours whose name Bridge does not know -> how its parameters are split over tensor-parallel ranks.
#: `LayerNormColumnParallelLinear` is known by its name: rows of the weight split, norm replicated.
PARALLELISM: dict[type, str] = {
    DuplicatedLinear: "replicated",
    CountingRouter: "replicated",
    Mamba2Mixer: "column",
    ColumnParallelGroupedLinear: "column",
    RowParallelGroupedLinear: "row",
}
#: Parameters of a Mamba layer -> the mapping of each; Bridge maps them in the decoder, not inside MTP.
_MAMBA = {
    **dict.fromkeys(("mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight"), ColumnParallelMapping),
    "mixer.out_proj.weight": RowParallelMapping,
    "mixer.in_proj.weight": MambaInProjMapping,
    "mixer.conv1d_weight": MambaConv1dMapping,
    "mixer.conv1d_bias": MambaConv1dMapping,
}


def stack_spec(config: Any) -> ModuleSpec:
    """Our stack: on TransformerEngine if it is installed and there is a GPU, else on plain torch.

    A provider with another kind of stack (`transformer_impl="inference_optimized"`,
    `restore_modelopt_state`) gets Bridge's own.
    """
    if getattr(config, "transformer_impl", None) == "inference_optimized" or config.restore_modelopt_state:
        return get_default_hybrid_stack_spec(config)
    # Determined now, not when `specs` was imported, which may be before CPU mode.
    return te_stack_spec() if default_backend() == "te" else torch_stack_spec()


def torch_stack_spec() -> ModuleSpec:
    """Our stack on plain torch."""
    return specs.nemotron3_torch_stack_spec


def te_stack_spec() -> ModuleSpec:
    """Our stack on TransformerEngine; building a model fails without it."""
    return specs.nemotron3_te_stack_spec


class VocabularyMapping(AutoMapping):
    """Mapping of the embedding or the head that cuts off the rows which pad the vocabulary.

    The cut is not in `maybe_modify_converted_hf_weight`, because verl's delta sync calls mappings only.
    """

    def __init__(self, megatron_param: str, hf_param: str, rows: int) -> None:
        super().__init__(megatron_param, hf_param)
        self.rows = rows

    def resolve(self, captures: tuple[str, ...]) -> VocabularyMapping:
        megatron_param, hf_param = self._resolve_names(captures)
        return VocabularyMapping(megatron_param, hf_param, self.rows)

    def megatron_to_hf(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._cut(super().megatron_to_hf(*args, **kwargs))

    def megatron_to_hf_quant(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._cut(super().megatron_to_hf_quant(*args, **kwargs))

    def _cut(self, tensors: dict[str, Any]) -> dict[str, Any]:
        cut = {self.hf_param: tensors[self.hf_param][: self.rows]} if self.hf_param in tensors else {}
        return {**tensors, **cut}


class Nemotron3Bridge(NemotronHBridge):
    """Bridge's converter of NemotronH, with our stack, the depth of MTP, and Mamba layers inside MTP."""

    def provider_bridge(self, hf_pretrained: Any) -> HybridModelProvider:
        """Provider of our stack for a Hugging Face model or config.

        Raises:
            ValueError: the experts of layers differ, as Puzzle's do. Bridge's converter reads one width.
        """
        hf_config = hf_pretrained.config
        if hasattr(hf_config, "to_dict") and has_blocks(hf_config.to_dict()):
            raise ValueError(
                f"{hf_config.name_or_path or 'config.json'} has {BLOCKS_KEY}: Megatron-Bridge builds all E "
                "layers alike. Convert it with `nemotron3 convert from-hf`, and train it with Megatron-LM"
            )
        provider = super().provider_bridge(hf_pretrained)
        provider.hybrid_stack_spec = stack_spec
        provider.apply_rope_fusion = False  # the family has no positions
        if provider.moe_router_num_groups == 1:  # choosing one group of one: the same experts without it
            provider.moe_router_num_groups = provider.moe_router_group_topk = None
        if provider.moe_latent_size:
            provider.moe_shared_expert_overlap = False  # Megatron's own MoE layer refuses it in training
        if te_problem() is not None:
            provider.moe_permute_fusion = False
        if cpu.is_active():
            for field in set(ARGUMENTS) & {field.name for field in dataclasses.fields(provider)}:
                setattr(provider, field, ARGUMENTS[field])
        if provider.mtp_num_layers:
            for field, value in mtp_training(hf_pretrained).items():
                setattr(provider, field, value)
        return provider

    @classmethod
    def megatron_to_hf_config(cls, provider: Any) -> dict[str, Any]:
        """config.json of a provider. It counts MTP blocks; our key describes MTP's training."""
        written: dict[str, Any] = super().megatron_to_hf_config(provider)
        if written[MTP_BLOCKS] and all(hasattr(provider, field) for field in OWN_FIELDS):
            written[OWN] = {field: getattr(provider, field) for field in OWN_FIELDS}
            if provider.mtp_use_repeated_layer:
                written[MTP_BLOCKS] = 1
        return written

    def mapping_registry(self) -> MegatronMappingRegistry:
        blocks, pattern = self._hf_mtp_config(self.hf_config)
        inside = [
            mapping(
                f"mtp.layers.{block}.mtp_model_layer.layers.{layer}.{name}",
                f"mtp.layers.{block * len(pattern) + layer}.{name.replace('conv1d_', 'conv1d.')}",
            )
            for block in range(blocks)
            for layer, kind in enumerate(pattern or "")
            if kind == "M"
            for name, mapping in _MAMBA.items()
        ]
        mappings = [
            self._without_padding(mapping) for mapping in super().mapping_registry().get_all_mappings()
        ]
        return MegatronMappingRegistry(*mappings, *inside)

    def _without_padding(self, mapping: Any) -> Any:
        rows = getattr(self.hf_config, "vocab_size", None)  # a registry is also made before there is a config
        if rows is None or mapping.hf_param not in ("backbone.embeddings.weight", "lm_head.weight"):
            return mapping
        return VocabularyMapping(mapping.megatron_param, mapping.hf_param, rows)


def mtp_training(hf_pretrained: Any) -> dict[str, Any]:
    """How MTP is trained, by `OWN_FIELDS`; empty where nothing is known that Bridge does not know.

    Hugging Face's format states the number of MTP blocks, and not how often they are applied. That comes from
    our key in config.json, or else from the catalog. Otherwise it comes from the stored blocks: several are
    applied once each, and one as often as config.json states, where Bridge 0.6.2 writes depths.
    """
    hf_config = hf_pretrained.config
    if not hasattr(hf_config, "to_dict"):
        return {}
    data = {key: value for key, value in hf_config.to_dict().items() if key != "quantization_config"}
    stated, stored = data[MTP_BLOCKS], _stored_mtp_blocks(hf_pretrained)
    data[MTP_BLOCKS] = stored or stated
    try:
        model, source = hf_model(Path(hf_config.name_or_path or "model"), data, None, None)
        if data.get(OWN) or identify(model):
            logger.info("MTP: %d depths, from %s", model.mtp_num_layers, source)
            return {field: getattr(model, field) for field in OWN_FIELDS}
    except ValueError as error:
        logger.warning("MTP: its depth is taken from the stored blocks, not from the catalog: %s", error)
    if not stored:
        return {}
    return {"mtp_num_layers": stated if stored == 1 else stored, "mtp_use_repeated_layer": stored == 1}


def _stored_mtp_blocks(hf_pretrained: Any) -> int:
    """MTP blocks among the tensors of a checkpoint; 0 if it has none, or there is only a config."""
    source = getattr(getattr(hf_pretrained, "state", None), "source", None)
    names = source.get_all_keys() if source is not None else ()
    return sum(re.fullmatch(r"mtp\.layers\.\d+\.eh_proj\.weight", name) is not None for name in names)


@dataclasses.dataclass(kw_only=True)
class Nemotron3ModelConfig(HybridModelConfig):
    """`HybridModelConfig` whose serialized form has what is needed to resume and to build the model again.

    The stock form leaves out all that is callable: it would be read back with the stock stack and GELU. Here
    the spec is the import path of a function, and the activation is kept.
    """

    builder: ClassVar[str] = f"{__name__}.Nemotron3ModelBuilder"
    hybrid_stack_spec: str = f"{__name__}.stack_spec"
    mamba_chunk_size: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The serialized config, with two sizes that Bridge's resume reads and `from_dict` ignores."""
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        found: dict[str, Any] = super().as_dict()
        found["transformer"]["activation_func"] = self.transformer.activation_func
        return {**found, **{size: getattr(self, size) for size in sizes}}


class Nemotron3ModelBuilder(HybridModelBuilder):
    """`HybridModelBuilder` that imports and calls the spec function, as a provider does."""

    def __init__(self, model_config: Nemotron3ModelConfig) -> None:
        module, _, name = model_config.hybrid_stack_spec.rpartition(".")
        config: Any = copy.copy(model_config)  # `transformer` stays the same object
        config.hybrid_stack_spec = getattr(importlib.import_module(module), name)
        config.hybrid_stack_spec = HybridModelProvider._resolve_hybrid_stack_spec(config)
        super().__init__(config)


def model_config(provider: HybridModelProvider) -> Nemotron3ModelConfig:
    """The same model for Megatron's newer path: a config with a builder.

    The provider is finalized. Its pre-wrap hooks, such as the one that loads weights, go with it.

    Raises:
        ValueError: the provider's spec cannot be imported by a name, so no checkpoint could state it.
    """
    spec = provider.hybrid_stack_spec or get_default_hybrid_stack_spec
    path = f"{getattr(spec, '__module__', '')}.{getattr(spec, '__qualname__', '')}"
    if not inspect.isfunction(spec) or "<" in path:
        raise ValueError(
            f"hybrid_stack_spec={spec}: a config stores a spec by its import path, so assign a function of a "
            "module, such as megatron_nemotron3.bridge.torch_stack_spec"
        )
    provider.finalize()
    values = _fields(Nemotron3ModelConfig, provider)
    values["transformer"] = TransformerConfig(**_fields(TransformerConfig, provider))
    values["hybrid_stack_spec"] = path
    values["pre_wrap_hooks"] = [provider.pre_wrap_hook] if provider.pre_wrap_hook else []
    return Nemotron3ModelConfig(**values)


@dataclasses.dataclass
class LoRA(lora.LoRA):
    """Bridge's LoRA, on every linear of the torch backend: routed experts and latent projections, too.

    Fields and names of parameters are Bridge's. Bridge's own class raises NotImplementedError for
    `DuplicatedLinear` and grouped linears. Here each routed expert has a pair of its own,
    and the routers' correction (`expert_bias`) is frozen with the base. `nemotron3 convert` exports the
    adapters to peft, or merges them (docs/training.md).
    """

    share_expert_adapters: bool = False

    def transform(
        self, module: torch.nn.Module, name: str | None = None, prefix: str | None = None
    ) -> torch.nn.Module:
        """Add an adapter to a linear of the torch backend; leave other modules to Bridge.

        Raises:
            ValueError: the adapters do not support a field's value.
        """
        kind = adapter_class(module)
        if kind is None or (matched := self.match(module, name, prefix)) is None:
            return super().transform(module, name, prefix)
        unsupported = ("dropout", "a2a_experimental", "normalize_moe_lora", "share_expert_adapters")
        for field in (*unsupported, "experts_shared_outer_loras"):
            if getattr(self, field):
                raise ValueError(f"LoRA with {field}={getattr(self, field)}: not supported on {matched[1]}")
        if "adapter" not in module._modules:
            module.adapter = kind(module, settings.LoRASettings(dim=self.dim, alpha=self.alpha), matched[1])
        return module

    def freeze_model(self, model: Any, training: bool = True) -> None:
        for chunk in model if isinstance(model, list) else [model]:
            get_model_config(chunk).moe_router_bias_update_rate = 0.0
        super().freeze_model(model, training)


def _fields(kind: type, source: Any) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(kind) if field.init)
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


for _module, _kind in PARALLELISM.items():
    AutoMapping.register_module_type(_module.__name__, _kind)
register_allowed_target_prefix(__package__)
MegatronModelBridge.register_bridge(
    source="NemotronHForCausalLM", target=HybridModel, provider=HybridModelProvider, model_type="nemotron_h"
)(Nemotron3Bridge)
