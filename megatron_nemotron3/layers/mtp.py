"""One multi-token-prediction (MTP) depth whose experts know that they belong to MTP.

    h_{k-1} [s, b, d] --hnorm--+
                               +--cat--> eh_proj --> the pattern's layers ("*E") --> final_layernorm --> h_k
    emb(token t+k)    --enorm--+

With `--mtp-use-repeated-layer` one such block is applied at every depth, so its experts are visited
once per depth. Their load-balancing loss must be divided by the number of depths. Upstream does that
when the router knows it is in MTP, but its hybrid stack does not tell it (megatron-core 0.17.1 to
0.19.2): the loss is counted once per depth and logged under a decoder layer.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron_nemotron3.layers.upstream import watch_mtp
from megatron_nemotron3.precision.install import emulate_mtp


class MTPLayer(MultiTokenPredictionLayer):
    """Upstream's `MultiTokenPredictionLayer` with `is_mtp_layer` told to every MoE layer inside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, BaseMoELayer):
                module.is_mtp_layer = True
                module.router.is_mtp_layer = True
                # The metric tracker has one slot per depth behind the decoder's layers. The number
                # inside the block ("*E": 2) overruns it when there is one depth (Megatron-LM #7172).
                module.router.set_layer_number(self.layer_number)
        emulate_mtp(self)
        watch_mtp(self)

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
        """Upstream's forward; refuses packed documents whose labels Megatron would roll at the wrong places.

        Raises:
            ValueError: padded borders differ from the unpadded ones (Megatron-LM #6205, #4495).
        """
        if packed_seq_params is not None:
            check_borders(packed_seq_params)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def check_borders(packed: PackedSeqParams) -> None:
    """Refuse packed documents with padding that only `cu_seqlens_q_padded` knows of.

    Megatron rolls MTP's tokens, labels and masks at `cu_seqlens_q`, while the tokens lie at the padded
    places: targets of one document would come from another. The loss would be wrong and look like any other.

    Raises:
        ValueError: the two differ.
    """
    real, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    if padded is None or real is padded or torch.equal(real, padded):
        return
    raise ValueError(
        f"packed documents end at {real.tolist()} and are padded to {padded.tolist()}: Megatron would roll "
        "MTP labels at the first, the tokens lie at the second (Megatron-LM #6205); pass the padded "
        "cu_seqlens in both places, as pretrain_hybrid.py does, and mask the padding in the loss"
    )
