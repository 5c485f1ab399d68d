"""The layer stack that a `--spec` of this package builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nemotron3.layers import padding
from megatron_nemotron3.layers.lora import add_when_built
from megatron_nemotron3.monitor.attach import watch_stack
from megatron_nemotron3.precision.install import emulate_stack


@dataclass
class Nemotron3StackSubmodules(HybridStackSubmodules):
    """Upstream's layer specs, and the final norm, which upstream always takes from TE."""

    #: Builder of the norm after the last layer: called with config, hidden_size, eps.
    final_norm: Any = None
    #: One line that names the implementation of each part; rank 0 prints it once per process.
    description: str = ""


class Nemotron3Stack(HybridStack):
    """`HybridStack` with `submodules.final_norm`; parameter names and checkpoint keys are unchanged."""

    _announced = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Nemotron3StackSubmodules,
        *args: Any,
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        # Upstream skips a layer for which the spec has no builder: the model would compute something else.
        if missing := [number for number, layer in enumerate(self.layers) if isinstance(layer, IdentityOp)]:
            raise ValueError(
                f"layers {missing} of this stage are of a kind that the spec does not build: Nemotron 3 has "
                "Mamba-2 (M), attention (*), MLP (-) and MoE (E); check --hybrid-layer-pattern"
            )
        if self.post_process and post_layer_norm:
            self.final_norm = submodules.final_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        if not Nemotron3Stack._announced:
            Nemotron3Stack._announced = True
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                print(f"megatron_nemotron3: {submodules.description}", flush=True)
        emulate_stack(self)
        watch_stack(self)
        add_when_built(self)
        size_moe_metrics(config)

    def forward(
        self,
        hidden_states: Any,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Upstream's forward; routers leave padding tokens out (layers/padding.py).

        Args:
            hidden_states: [s, b, d], this rank's part; upstream wraps it in inference.
            padding_mask: [b, s / cp], True for padding.

        Raises:
            ValueError: the mask has another length.
        """
        if padding_mask is not None or packed_seq_params is not None:
            hidden = hidden_states if self.pre_process else self.input_tensor
            if isinstance(hidden, torch.Tensor):
                padding_mask = padding.local_mask(
                    padding_mask,
                    packed_seq_params,
                    hidden,
                    self.config.sequence_parallel,
                    self.pg_collection,
                )
        padding.hand_to_mtp(padding_mask)
        output: torch.Tensor = super().forward(
            hidden_states, *args, packed_seq_params=packed_seq_params, padding_mask=padding_mask, **kwargs
        )
        return output


def size_moe_metrics(config: TransformerConfig) -> None:
    """Create the metrics that Megatron logs for the routers, with one slot per decoder layer and MTP depth.

    Ranks of all pipeline stages add up these tensors. The routers of a stage create them with this size. For
    a stage without E layers the training loop creates them, and in 0.19 it counts only the E layers. Stages
    that add tensors of different sizes abort in gloo; in NCCL the result is undefined.
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
