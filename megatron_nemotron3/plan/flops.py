"""Floating-point operations of a training step, by layer kind and module. Closed forms, standard
library only.

Model FLOPs: two for each multiplication of a product, forward; twice that in backward (gradients of the input
and of the weight); recomputing counts nothing. Causal scores count half the square. Element-wise
work (norms, activations, gates) is not counted, as in Megatron's throughput line.

Where Megatron's own count (`num_floating_point_operations`, 0.19) differs, `stock_differences` says by what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.flops import weightless_flops
from megatron_nemotron3.models.parameters import StoredTensor, layer_tensors

#: Backward of a product costs two products.
BACKWARD = 2
#: HF name of a tensor -> module the operations are listed under.
MODULES = {
    "mixer.in_proj.weight": "in_proj",
    "mixer.conv1d.weight": "conv1d",
    "mixer.out_proj.weight": "out_proj",
    "mixer.q_proj.weight": "qkv",
    "mixer.k_proj.weight": "qkv",
    "mixer.v_proj.weight": "qkv",
    "mixer.o_proj.weight": "proj",
    "mixer.gate.weight": "router",
    "mixer.experts.{e}.up_proj.weight": "experts",
    "mixer.experts.{e}.down_proj.weight": "experts",
    "mixer.shared_experts.up_proj.weight": "shared experts",
    "mixer.shared_experts.down_proj.weight": "shared experts",
    "mixer.fc1_latent_proj.weight": "latent projections",
    "mixer.fc2_latent_proj.weight": "latent projections",
    "mixer.up_proj.weight": "mlp",
    "mixer.down_proj.weight": "mlp",
}


@dataclass(frozen=True)
class Operations:
    """Operations of one module.

    kind: layer kind "M", "*", "E", "-", "mtp" for what an MTP depth has beside its layers, or "output".
    forward: FLOPs of one token's forward pass, summed over the layers.
    layers: how often the module is applied: MTP layers once for each depth.
    """

    kind: str
    module: str
    forward: float
    layers: int

    @property
    def backward(self) -> float:
        """FLOPs of one token's backward pass."""
        return BACKWARD * self.forward


def layer_operations(config: Nemotron3Config, kind: str, seq_length: int) -> dict[str, float]:
    """Module -> forward FLOPs of one token in one layer.

    Args:
        kind: "M", "*", "E" or "-".
        seq_length: tokens of a sequence; of packed ones the mean of squares over the mean length.

    Raises:
        ValueError: no such kind.
    """
    return dict(_layer_operations(config, kind, seq_length))


def _applied(tensor: StoredTensor) -> int:
    return tensor.active_elements if tensor.trainable else 0


@lru_cache(maxsize=1024)
def _layer_operations(config: Nemotron3Config, kind: str, seq_length: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for tensor in layer_tensors(config, kind):
        if (module := MODULES.get(tensor.name)) is not None:
            found[module] = found.get(module, 0.0) + 2.0 * _applied(tensor)
    if kind == "*":
        found["scores"] = weightless_flops(config, kind, seq_length)
    elif kind == "M":
        found["scan"] = weightless_flops(config, kind, seq_length)
    return found


def model_operations(config: Nemotron3Config, seq_length: int | None = None) -> list[Operations]:
    """Every module of a model that multiplies, MTP at every depth included.

    Args:
        seq_length: None: `config.seq_length`.
    """
    return list(_operations(config, seq_length or config.seq_length))


def _operations(config: Nemotron3Config, seq_length: int) -> Iterator[Operations]:
    depths = config.mtp_num_layers if config.has_mtp else 0
    applied = config.pattern + (config.mtp_pattern or "") * depths
    for kind in dict.fromkeys(applied):
        layers = applied.count(kind)
        for module, forward in layer_operations(config, kind, seq_length).items():
            yield Operations(kind, module, forward * layers, layers)
    if depths:
        yield Operations("mtp", "eh_proj", 2.0 * 2 * config.hidden_size**2 * depths, depths)
    output = 2.0 * config.vocab_size * config.hidden_size
    yield Operations("output", "output_layer", output * (1 + depths), 1 + depths)


def step_flops(config: Nemotron3Config, tokens: int, seq_length: int | None = None) -> float:
    """Forward and backward of a step of so many tokens."""
    return tokens * (1 + BACKWARD) * sum(line.forward for line in model_operations(config, seq_length))


def stock_differences(config: Nemotron3Config, seq_length: int | None = None) -> dict[str, float]:
    """What Megatron 0.19's count has more (negative: less) than ours, forward FLOPs of one token, by cause.

    Layers of all MTP depths are in both counts.
    """
    length = seq_length or config.seq_length
    depths = config.mtp_num_layers if config.has_mtp else 0
    applied = config.pattern + (config.mtp_pattern or "") * depths
    mamba, moe = applied.count("M"), applied.count("E")
    inner, stock_inner = config.mamba_inner_size, 2 * config.hidden_size
    state = config.mamba_state_dim
    found = {
        # It takes expand 2 for granted: in_proj's z and x, and out_proj.
        "Mamba's inner size taken as 2 * hidden": mamba * 6.0 * config.hidden_size * (stock_inner - inner),
        "7 * inner * state for the scan": mamba
        * (7.0 * stock_inner * state - weightless_flops(config, "M", length)),
        "convolution left out": -mamba * (layer_operations(config, "M", length)["conv1d"] if mamba else 0.0),
        "router left out": -moe * (layer_operations(config, "E", length)["router"] if moe else 0.0),
        "MTP's eh_proj left out": -4.0 * config.hidden_size**2 * depths,
    }
    return {cause: value for cause, value in found.items() if value}
