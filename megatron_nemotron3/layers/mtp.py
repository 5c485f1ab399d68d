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

from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer


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
