"""What it costs to generate with a model: memory, and the time to decode a token of each sequence.

A layer takes the longer of two times: what it reads and writes at the GPU's attained bandwidth, or its
products at their attained rate. Launches and collectives are left out. It compares sizes of a network;
nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.launch.plan.flops import resolve, symbols
from megatron_nemotron3.launch.plan.hardware import GPU
from megatron_nemotron3.launch.plan.timing import ASSUMED, Assumptions
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import count, elements_outside_layers, layer_flops, layer_tensors

#: Bytes of a weight, key, value or input of the convolution, and of an element of Mamba's state.
_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class ServingUse:
    """How a model is used: `sequences` of `context` tokens are decoded together. It need not fit on a GPU."""

    gpu: GPU
    sequences: int = 1
    context: int = 8192
    assumed: Assumptions = ASSUMED

    def __post_init__(self) -> None:
        for name in ("sequences", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: give 1 or more")


def layer_state_bytes(config: Nemotron3Config, kind: str, context: int) -> int:
    """Bytes that a layer keeps of a sequence: keys and values, or Mamba's window and state."""
    if kind == "*":
        return 2 * config.num_query_groups * config.kv_channels * context * _BF16
    if kind == "M":
        channels = config.mamba_inner_size + 2 * config.mamba_num_groups * config.mamba_state_dim
        window = (config.mamba_conv_kernel - 1) * channels
        return window * _BF16 + config.mamba_inner_size * config.mamba_state_dim * _FP32
    return 0


@lru_cache(maxsize=65536)
def layer_seconds(config: Nemotron3Config, kind: str, serving: ServingUse) -> float:
    """Seconds of a step in one layer.

    Experts are taken to be chosen evenly, so that n sequences read N (1 - (1 - k/N)^n) of N experts.
    """
    weights = 0.0
    for tensor in layer_tensors(config, kind):
        share = 1.0
        if tensor.copies > 1:
            share = 1 - (1 - tensor.active_copies / tensor.copies) ** serving.sequences
        weights += tensor.elements * share * _BF16
    # Keys and values are read, Mamba's state is read and written.
    passes = 2 if kind == "M" else 1
    moved = weights + passes * serving.sequences * layer_state_bytes(config, kind, serving.context)
    # `layer_flops` counts causal attention, which sees half of a sequence on average.
    flops = layer_flops(config, kind, 2 * serving.context if kind == "*" else 1) * serving.sequences
    return _longer(moved, flops, serving)


def _longer(moved: float, flops: float, serving: ServingUse) -> float:
    gpu, assumed = serving.gpu, serving.assumed
    return max(moved / (gpu.hbm * assumed.memory), flops / (gpu.bf16 * assumed.products["bf16"]))


def outside_seconds(config: Nemotron3Config, serving: ServingUse) -> float:
    """Seconds of a step in the output layer; the embedding reads one row a sequence."""
    elements = elements_outside_layers(config)["output_layer"]
    return _longer(elements * _BF16, 2.0 * elements * serving.sequences, serving)


def step_seconds(config: Nemotron3Config, serving: ServingUse) -> float:
    """Seconds to decode one token of every sequence, without drafts of MTP."""
    layers = (layer_seconds(*resolve(config, symbol), serving) for symbol in symbols(config))
    return outside_seconds(config, serving) + sum(layers)


def serving_bytes(config: Nemotron3Config, serving: ServingUse) -> int:
    """Bytes of all weights, as a release stores them in BF16, and of the state of all sequences."""
    layers = sum(layer_state_bytes(config, kind, serving.context) for kind in config.pattern)
    return count(config).stored_bytes + serving.sequences * layers
