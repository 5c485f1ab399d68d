"""The layers of a model in order, with the prefix of their names on both sides.

Megatron numbers MTP blocks and the layers in each block; Hugging Face numbers all MTP layers consecutively:

    mtp.layers.o.mtp_model_layer.layers.i.…   <->   mtp.layers.{o * P + i}.…     P layers per block
    mtp.layers.o.enorm.weight                 <->   mtp.layers.{o * P}.enorm.weight
    mtp.layers.o.final_layernorm.weight       <->   mtp.layers.{o * P + P - 1}.final_layernorm.weight

Where experts differ by layer, Hugging Face's names begin with `model.` instead of `backbone.`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.tensors import hf_root

#: Limits for damaged or hostile configurations. Ultra has 110 layers and 25,600 experts.
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 1_000_000


@dataclass(frozen=True)
class Prefix:
    """A layer, or the model itself: its part of the table, and the prefix of its names on both sides."""

    part: str
    megatron: str
    hf: str
    #: Of the layer (`Nemotron3Config.at`); the model's own outside the decoder.
    config: Nemotron3Config = field(repr=False, compare=False)


def prefixes(config: Nemotron3Config) -> Iterator[Prefix]:
    """Yield the prefixes of a model in the order of its layers: model, decoder, MTP blocks."""
    layers = len(config.pattern) + config.mtp_num_blocks * len(config.mtp_pattern or "")
    experts = layers * (config.num_moe_experts or 1)
    if layers > _MOST_LAYERS or experts > _MOST_EXPERTS:
        raise ValueError(
            f"{config.name}: {layers:,} layers with {config.num_moe_experts or 0:,} experts each exceed the "
            f"limits of {_MOST_LAYERS:,} layers and {_MOST_EXPERTS:,} experts in all"
        )
    yield Prefix("model", "", "", config)
    root = hf_root(config)
    for layer, kind in enumerate(config.pattern):
        yield Prefix(kind, f"decoder.layers.{layer}.", f"{root}.layers.{layer}.", config.at(layer))
    inner = config.mtp_pattern or ""
    for block in range(config.mtp_num_blocks):
        prefix, first = f"mtp.layers.{block}.", block * len(inner)
        yield Prefix("mtp_in", prefix, f"mtp.layers.{first}.", config)
        for layer, kind in enumerate(inner):
            below = f"{prefix}mtp_model_layer.layers.{layer}."
            yield Prefix(kind, below, f"mtp.layers.{first + layer}.", config)
        yield Prefix("mtp_out", prefix, f"mtp.layers.{first + len(inner) - 1}.", config)
