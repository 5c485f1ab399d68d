"""The model and the elements of the checkpoints in this folder. numpy only when called."""

from __future__ import annotations

from typing import Any
from zlib import crc32

#: Every kind of layer, and MTP; no size is another's.
LAYERS = "ME*-/*E"
VOCABULARY = 24
#: TransformerConfig fields.
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 2,
    "ffn_hidden_size": 20,
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
    "num_moe_experts": 2,
    "moe_router_topk": 1,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 28,
    "moe_latent_size": 10,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_token_dispatcher_type": "alltoall",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
}


def part(key: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> Any:
    """Elements [offset, offset + size) of a tensor, float32 [size].

    Element i (row-major) is ((7 i + crc32(key)) mod 251 - 125) / 64: exact in bfloat16, and different in
    any two places less than 251 apart.
    """
    import numpy

    index = numpy.zeros((1,) * len(shape), numpy.int64)
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        line = (numpy.arange(size[axis]) + offset[axis]) * step
        index = index + line.reshape([-1 if a == axis else 1 for a in range(len(shape))])
        step *= shape[axis]
    return (((7 * index + crc32(key.encode())) % 251 - 125) / 64).astype(numpy.float32)


def values(key: str, shape: tuple[int, ...]) -> Any:
    """The whole tensor a key names, float32 [shape]."""
    return part(key, shape, (0,) * len(shape), shape)
