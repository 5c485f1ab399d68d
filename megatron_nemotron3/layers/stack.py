"""The layer stack that a `--spec` of this package builds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from torch import Tensor

from megatron_nemotron3.layers import padding
from megatron_nemotron3.layers.attention import TorchCoreAttention
from megatron_nemotron3.layers.context_parallel import PackedContextParallel, mark_whole
from megatron_nemotron3.layers.registration import announce_completion, argument, keep_argument, when_taken
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.stack_specs import ARGUMENT, experts_text


@dataclass
class Nemotron3StackSubmodules(HybridStackSubmodules):
    """Upstream's layer specs, and the final norm, which upstream always takes from TE."""

    #: Builder of the norm after the last layer: called with config, hidden_size, eps.
    final_norm: Any = None
    #: One line that names the implementation of each part; rank 0 prints it once per process.
    description: str = ""
    #: The model whose E layers have experts of their own width and top-k (`moe_layers`); None: all of them
    #: have those of the TransformerConfig.
    model: Nemotron3Config | None = None
    #: Called with each stack when its layers are built: emulation, monitors, adapters.
    when_built: tuple[Callable[[HybridStack], None], ...] = ()


class SizedMoELayer(MoETransformerLayer):
    """Upstream's E layer with the expert width and the top-k of its number (from 1) in the model.

    Megatron-Core 0.19 gives `shared`, the stack's config, to all layers, so this layer gets a copy; later
    versions give a config to each, which is changed in place.

    Raises:
        ValueError: a list of layer configs has given this layer other sizes than the model's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        model: Nemotron3Config,
        shared: TransformerConfig,
        layer_number: int = 1,
        **kwargs: Any,
    ) -> None:
        # A copy of the fields: constructing a TransformerConfig again would apply its defaults twice. What
        # Megatron sets on a model's config later (functions of the schedule, timers) no layer reads.
        own = copy(config) if config is shared else config
        sizes = model.at(layer_number - 1)
        given, wanted = ((c.moe_ffn_hidden_size, c.moe_router_topk) for c in (own, sizes))
        if given not in (wanted, (shared.moe_ffn_hidden_size, shared.moe_router_topk)):
            raise ValueError(
                f"layer {layer_number} has experts of width {given[0]} and top {given[1]} by its config, and "
                f"{wanted[0]} and {wanted[1]} in {model.name}: use a spec that has no model's name"
            )
        own.moe_ffn_hidden_size, own.moe_router_topk = wanted
        super().__init__(own, *args, layer_number=layer_number, **kwargs)
        # A TE linear turns the overlap off for all layers that are built after it.
        config.tp_comm_overlap = own.tp_comm_overlap


class Nemotron3Stack(HybridStack):
    """`HybridStack` with `submodules.final_norm`; parameter names and checkpoint keys are unchanged."""

    _announced = False
    #: Runs the layers in place of a plain call, as in a frozen model (post_training/boost/heads.py): it is
    #: given a function that computes this stage's output, and returns that.
    around: Callable[[Callable[[], Tensor]], Tensor] | None = None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Nemotron3StackSubmodules,
        *args: Any,
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        model = submodules.model
        built = submodules if model is None else _sized(submodules, model, config)
        super().__init__(config, built, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        # Upstream skips a layer for which the spec has no builder: the model would compute something else.
        if missing := [number for number, layer in enumerate(self.layers) if isinstance(layer, IdentityOp)]:
            raise ValueError(
                f"layers {missing} of this stage are of a kind that the spec does not build: Nemotron 3 has "
                "Mamba-2 (M), attention (*), MLP (-) and MoE (E); check --hybrid-layer-pattern"
            )
        if model is not None:
            _require_layers(self.layers, model)
            keep_argument(ARGUMENT, experts_text(model))
        when_taken(self, operator.is_, partial(_follow_list, model))
        if self.post_process and post_layer_norm:
            self.final_norm = submodules.final_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        if not Nemotron3Stack._announced:
            Nemotron3Stack._announced = True
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                print(f"megatron_nemotron3: {submodules.description}", flush=True)
        for attach in submodules.when_built:
            attach(self)
        self._isolated = bool(argument("dataloader_inter_document_masking")) and not argument("sft")
        if self._isolated:
            when_taken(self, operator.is_, _mark_rows)
        announce_completion(self)
        size_moe_metrics(config)

    def forward(
        self,
        hidden_states: Any,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Upstream's forward; routers leave padding tokens out (layers/padding.py).

        Args:
            hidden_states: [s, b, d], this rank's part; upstream wraps it in inference.
            padding_mask: [b, s / cp], True for padding.
        """
        if self._isolated and packed_seq_params is None:
            raise ValueError(
                "--dataloader-inter-document-masking: this script gives the model no borders of documents, "
                "so they would not be isolated: use the stock pretrain_hybrid.py, or `nemotron3 train`"
            )
        if padding_mask is not None or packed_seq_params is not None:
            hidden = hidden_states if self.pre_process else self.input_tensor
            if isinstance(hidden, Tensor):
                sp, groups = self.config.sequence_parallel, self.pg_collection
                padding_mask = padding.local_mask(padding_mask, packed_seq_params, hidden, sp, groups)
        padding.hand_to_mtp(padding_mask)
        kwargs |= {"packed_seq_params": packed_seq_params, "padding_mask": padding_mask}
        run = partial(super().forward, hidden_states, *args, **kwargs)
        output: Tensor = run() if self.around is None else self.around(run)
        return output


def _follow_rows(model: torch.nn.Module) -> bool:
    """Whether the layers can keep to documents in a row that is cut whole."""
    return all(
        isinstance(module.cp, PackedContextParallel)
        if isinstance(module, MambaMixer)
        else isinstance(module.core_attention, TorchCoreAttention)
        for module in model.modules()
        if isinstance(module, (MambaMixer, Attention))
    )


def _mark_rows(model: torch.nn.Module) -> None:
    """Let the layers know that the script cuts rows over context-parallel ranks regardless of documents."""

    def mark(model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        packed = kwargs.get("packed_seq_params")
        if packed is not None and model.pg_collection.cp.size() > 1:
            if not _follow_rows(model):
                raise ValueError(
                    "--dataloader-inter-document-masking with context parallelism: Megatron cuts the whole "
                    "row, and the layers of this backend take one that is cut document by document: use the "
                    "torch backend's --spec"
                )
            mark_whole(packed)

    model.register_forward_pre_hook(mark, with_kwargs=True)


def _sized(
    submodules: Nemotron3StackSubmodules, model: Nemotron3Config, config: TransformerConfig
) -> Nemotron3StackSubmodules:
    """Layer specs of the decoder with the E layers of `model`; MTP builds its own from the others."""
    if config.num_layers != model.num_layers:
        raise _unfit(
            model, f"which has {model.num_layers} layers", f"--hybrid-layer-pattern has {config.num_layers}"
        )
    experts, most = config.num_moe_experts or 0, max(topk for _, topk in model.expert_sizes)
    if experts < most:
        raise _unfit(model, f"of which a token gets up to {most}", f"--num-experts is {experts}")
    spec = submodules.moe_layer
    assert isinstance(spec, ModuleSpec) and spec.module is MoETransformerLayer
    params = {**spec.params, "model": model, "shared": config}
    return replace(submodules, moe_layer=replace(spec, module=SizedMoELayer, params=params))  # type: ignore[call-arg]


def _require_layers(layers: Any, model: Nemotron3Config) -> None:
    """Raise ValueError unless exactly the E layers of `model` are E layers."""
    for layer in layers:
        number, kind = layer.layer_number, model.pattern[layer.layer_number - 1]
        if isinstance(layer, SizedMoELayer) != (kind == "E"):
            raise _unfit(
                model, f"whose layer {number} is {kind!r}", "--hybrid-layer-pattern has another there"
            )


def _follow_list(model: Nemotron3Config | None, owner: Any) -> None:
    """Compare the layer configs that define the whole model (Megatron-LM #7153) with the spec's experts."""
    listed = getattr(owner, "hybrid_layer_config_list", None)
    if listed is None:
        return
    config, own = owner.config, {"moe_ffn_hidden_size", "moe_router_topk"}
    decoder = [*takewhile(lambda entry: getattr(entry, "__name__", "") != "MTPSplit", listed)]
    layers = [entry for entry in decoder if type(entry).__name__ == "MoELayerConfig"]
    text = " ".join(f"{layer.moe_ffn_hidden_size}:{layer.moe_router_topk}" for layer in layers)
    if model is not None and text != experts_text(model):
        raise _unfit(
            model, f"width:top-k {experts_text(model):.200}", f"hybrid_layer_config_list has {text:.200}"
        )
    # A checkpoint states these two for each E layer of the decoder, and other sizes once for all layers.
    sizes = {one.name for one in fields(Nemotron3Config) if one.name in vars(config)} - {"mtp_num_layers"}

    def alike(entries: Any, names: set[str]) -> bool:
        built = [entry for entry in entries if not isinstance(entry, type)]
        return all(getattr(entry, name) == getattr(config, name) for entry in built for name in names)

    if alike(decoder, sizes - own) and alike(listed[len(decoder) :], sizes):
        keep_argument(ARGUMENT, "" if alike(layers, own) else text)


def _unfit(model: Nemotron3Config, has: str, launch: str) -> ValueError:
    return ValueError(
        f"the spec has the experts of each layer of {model.name}, {has}, but {launch}: give that of "
        f"{model.name}, or a --spec for your model (megatron_nemotron3.specs.stack_spec)"
    )


def size_moe_metrics(config: TransformerConfig) -> None:
    """Create the metrics that Megatron logs for the routers, with one slot per decoder layer and MTP depth.

    Ranks of all pipeline stages add up these tensors. For a stage without E layers the training loop of 0.19
    would create them with one slot per E layer, and different sizes abort in gloo; in NCCL the result is
    undefined.
    """
    if config.num_moe_experts is None:
        return
    kinds = config.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # The prefixes in Megatron's names: "aux_loss" -> "load_balancing_loss".
    names = [kind.replace("aux_loss", "load_balancing_loss") for kind in kinds if kind.endswith("aux_loss")]
    names += ["z_loss"] if config.moe_z_loss_coeff is not None else []
    tracker, slots = get_moe_metrics_tracker(), config.num_layers + (config.mtp_num_layers or 0)
    for name in names:
        if name in tracker.metrics and len(tracker.metrics[name].values) < slots:
            del tracker.metrics[name]  # of a smaller model in this process
        tracker.ensure_initialized(name, slots)
