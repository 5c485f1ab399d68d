"""The layer stack a `--spec` of this package builds: upstream's HybridStack, final norm from the spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nemotron3.layers.upstream import HybridStack, HybridStackSubmodules, watch_stack
from megatron_nemotron3.precision.install import emulate_stack


@dataclass
class Nemotron3StackSubmodules(HybridStackSubmodules):
    """Upstream's layer specs, plus what upstream takes from TE whatever the spec says."""

    #: Builder of the norm behind the last layer: called with config, hidden_size, eps.
    final_norm: Any = None
    #: One line on which implementation each part uses; printed once per process on rank 0.
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
