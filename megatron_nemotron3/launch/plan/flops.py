"""Floating-point operations of a training step, by layer kind and module, in closed form.

Two for each multiplication of a matrix product in forward, twice that in backward. Recomputation and
element-wise work do not count, and causal scores count half the square, as in Megatron's throughput.

A layer's symbol is its letter of the pattern. Where E layers differ (`Nemotron3Config.moe_layers`), theirs is
a character for each width and number of experts per token, so that equal layers can be counted. Other kinds
("embedding", "mtp_in") are their own symbols, and MTP's E is "E".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import elements_outside_layers, layer_tensors, weightless_flops
from megatron_nemotron3.models.tensors import ROWS, Row

#: Characters from here on stand for E layers: this plus the first decoder layer of that kind.
_FIRST = 0xE000


@lru_cache(maxsize=256)
def symbols(config: Nemotron3Config) -> str:
    """The symbol of each decoder layer."""
    if config.moe_layers is None:
        return config.pattern
    first: dict[Nemotron3Config, int] = {}
    found = ""
    for layer, letter in enumerate(config.pattern):
        number = first.setdefault(config.at(layer), layer)
        found += chr(_FIRST + number) if letter == "E" else letter
    return found


def letter(symbol: str) -> str:
    """The letter of the pattern, or the kind itself if it is no layer of the decoder."""
    return "E" if len(symbol) == 1 and ord(symbol) >= _FIRST else symbol


@lru_cache(maxsize=4096)
def expert_configs(config: Nemotron3Config, pattern: str) -> tuple[Nemotron3Config, ...]:
    """The different configs of the E layers among these symbols."""
    return tuple(dict.fromkeys(resolve(config, symbol)[0] for symbol in pattern if letter(symbol) == "E"))


@lru_cache(maxsize=65536)
def expert_layers(pattern: str) -> int:
    """Number of E layers among these symbols."""
    return sum(letter(symbol) == "E" for symbol in pattern)


def resolve(config: Nemotron3Config, symbol: str) -> tuple[Nemotron3Config, str]:
    """(config of the layers of a symbol, their letter)."""
    if letter(symbol) == symbol:
        return config, symbol
    return config.at(ord(symbol) - _FIRST), "E"


#: The backward pass of a matrix product takes two products.
BACKWARD = 2
_LABELS = {
    "mamba_in": "in_proj",
    "convolution": "conv1d",
    "mamba_out": "out_proj",
    "shared_experts": "shared experts",
    "latent": "latent projections",
}


def module_of(row: Row) -> str | None:
    """The name under which the operations of a row of the table of tensors are listed; None for vectors."""
    if row.linear == "attention":  # linear_qkv, linear_proj
        return row.modules[0].rpartition("linear_")[2]
    return _LABELS.get(row.linear, row.linear) if row.linear else None


@dataclass(frozen=True)
class Operations:
    """Operations of one module.

    kind: layer kind "M", "*", "E", "-", "mtp" for the part of an MTP depth outside its layers, or "output".
    forward: FLOPs of one token's forward pass, summed over the layers.
    layers: how often the module is applied; MTP layers once for each depth.
    """

    kind: str
    module: str
    forward: float
    layers: int

    @property
    def backward(self) -> float:
        return BACKWARD * self.forward


@lru_cache(maxsize=1024)
def layer_operations(config: Nemotron3Config, kind: str, seq_length: int) -> Mapping[str, float]:
    """Module -> forward FLOPs of one token in one layer."""
    found: dict[str, float] = {}
    module = {tensor.name: module_of(row) for row in ROWS if row.part == kind for tensor in row.hf}
    for tensor in layer_tensors(config, kind):
        if (name := module[tensor.name]) is not None:
            found[name] = found.get(name, 0.0) + 2.0 * tensor.active_elements
    if kind in "*M":
        found["scores" if kind == "*" else "scan"] = weightless_flops(config, kind, seq_length)
    return found


def model_operations(config: Nemotron3Config, seq_length: int | None = None) -> list[Operations]:
    """All modules of a model with matrix products, MTP at every depth included."""
    length = seq_length or config.seq_length
    depths = config.mtp_num_layers if config.has_mtp else 0
    applied = symbols(config) + (config.mtp_pattern or "") * depths
    outside = elements_outside_layers(config)
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for symbol in dict.fromkeys(applied):
        layers, (own, kind) = applied.count(symbol), resolve(config, symbol)
        for module, forward in layer_operations(own, kind, length).items():
            before, times = sums.get((kind, module), (0.0, 0))
            sums[kind, module] = (before + forward * layers, times + layers)
    found = [Operations(kind, module, *total) for (kind, module), total in sums.items()]
    if depths:
        found.append(Operations("mtp", "eh_proj", 2.0 * outside["mtp"] * depths, depths))
    output = 2.0 * outside["output_layer"]
    return [*found, Operations("output", "output_layer", output * (1 + depths), 1 + depths)]


def step_flops(config: Nemotron3Config, tokens: int, seq_length: int | None = None) -> float:
    """FLOPs of forward and backward for a number of tokens."""
    return tokens * (1 + BACKWARD) * sum(line.forward for line in model_operations(config, seq_length))
