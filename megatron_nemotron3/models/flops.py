"""Forward FLOPs of one layer for one token, in closed form. Standard library only."""

from __future__ import annotations

from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.parameters import active_layer_parameters


def weightless_flops(config: Nemotron3Config, kind: str, seq_length: int) -> float:
    """FLOPs of a layer of kind "M", "*", "E" or "-" that involve no weights.

    Causal attention sees half the sequence on average. The SSD scan costs a chunk-sized attention (half of
    it causal) and two passes over the state.
    """
    if kind == "*":
        return 2.0 * config.num_attention_heads * config.kv_channels * seq_length
    if kind == "M":
        groups_state = config.mamba_num_groups * config.mamba_state_dim
        chunk = min(config.mamba_chunk_size, seq_length)
        return chunk * (groups_state + config.mamba_inner_size) + 4.0 * (
            config.mamba_inner_size * config.mamba_state_dim
        )
    return 0.0


def layer_flops(config: Nemotron3Config, kind: str, seq_length: int) -> float:
    """Forward FLOPs of one layer: two for each active parameter, plus `weightless_flops`."""
    return 2.0 * active_layer_parameters(config, kind) + weightless_flops(config, kind, seq_length)
