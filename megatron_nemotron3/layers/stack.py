"""The layer stack that a `--spec` of this package builds, and its multi-token-prediction (MTP) layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nemotron3.layers import padding
from megatron_nemotron3.layers.lora import add_when_built
from megatron_nemotron3.monitor.attach import watch_mtp, watch_stack
from megatron_nemotron3.precision.install import emulate_mtp, emulate_stack


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


class MTPLayer(MultiTokenPredictionLayer):
    """One depth of multi-token prediction (MTP) that tells its MoE layers that they belong to MTP.

        h_{k-1} [s, b, d] --hnorm--+
                                   +--cat--> eh_proj --> pattern's layers ("*E") --> final_layernorm --> h_k
        emb(token t+k)    --enorm--+

    With `--mtp-use-repeated-layer` one such block is applied at every depth, so its experts run once per
    depth, and their load-balancing loss must be divided by the number of depths. Upstream divides if the
    router knows that it is in MTP. In megatron-core 0.19 the hybrid stack does not tell it: the loss would
    count once per depth and be logged under a decoder layer. main tells it (Megatron-LM #6748), and only the
    layer number is left to set here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, BaseMoELayer):
                if not module.router.is_mtp_layer:
                    module.is_mtp_layer = module.router.is_mtp_layer = True
                # The metrics tracker has one slot per depth after the decoder's layers. The number
                # inside the block ("*E": 2) overruns it if there is one depth (Megatron-LM #7172).
                module.router.set_layer_number(self.layer_number)
        emulate_mtp(self)
        watch_mtp(self)

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
        """Upstream's forward; refuses packed documents whose labels Megatron would roll wrongly.

        Raises:
            ValueError: padded borders differ from the unpadded ones (Megatron-LM #6205, #4495).
        """
        if packed_seq_params is not None:
            check_borders(packed_seq_params)
        if kwargs.get("padding_mask") is None:
            kwargs["padding_mask"] = padding.of_decoder()
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def _get_embeddings(self, *args: Any, padding_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Upstream's, but the mask stays: what is padding at a depth is what is padding in the decoder.

        Upstream rolls the mask with the tokens, which makes a document's last real token padding and its last
        padding token real.
        """
        ids, positions, _, embedded, hidden = super()._get_embeddings(*args, **kwargs)
        return ids, positions, padding_mask, embedded, hidden


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


def check_borders(packed: PackedSeqParams) -> None:
    """Refuse packed documents whose padding appears in `cu_seqlens_q_padded` only.

    Megatron rolls MTP's tokens, labels and masks at `cu_seqlens_q`, but the tokens lie at the padded
    positions. Targets would then come from the neighbouring document, and the wrong loss would go unnoticed.

    Raises:
        ValueError: the two differ.
    """
    real, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    if padded is None or real is padded or torch.equal(real, padded):
        return
    raise ValueError(
        f"packed documents end at {real.tolist()} and are padded to {padded.tolist()}: Megatron would roll "
        "MTP labels at the first, but the tokens lie at the second (Megatron-LM #6205); pass the padded "
        "cu_seqlens as both, as pretrain_hybrid.py does, and mask the padding in the loss"
    )
