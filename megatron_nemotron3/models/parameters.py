"""Parameter counts, the tensor inventory of a checkpoint, and FLOPs of a layer, in closed form.

Every count is a sum over the table of tensors (`models.tensors`). A routed expert is listed once with the
number of its copies, so nothing is enumerated.

Active parameters are those that one token is multiplied with: all of the model except the routed experts that
the token is not sent to. Publications differ in what they add to the layers, hence `ACTIVE_CONVENTIONS`:

| convention | counts | reproduces | off by |
|-|-|-|-|
| without_embeddings | layers and final norm | no published figure | |
| with_output_layer | the same and the output layer | Nano 3.2B, Ultra 55B | +0.9 %, -0.03 % |
| with_embeddings | the same and the embedding table | Nano 3.6B, Super 12.7B | -0.6 %, +0.6 % |

Super's 12.77B is published as 12.7B. Without the routers' 84M the count is 12.69B, and the total 120.59B
(published: 120.6B, exact: 120.67B), so its authors may have left the routers out; no source says so.
MTP does not count as active, because it does not run when the next token is predicted.

The prefixes of a layer's names: Megatron numbers MTP blocks and the layers in each block; Hugging Face
numbers all MTP layers consecutively. P is the number of layers in a block:

    mtp.layers.o.mtp_model_layer.layers.i.…   <->   mtp.layers.{o * P + i}.…
    mtp.layers.o.enorm.weight                 <->   mtp.layers.{o * P}.enorm.weight
    mtp.layers.o.final_layernorm.weight       <->   mtp.layers.{o * P + P - 1}.final_layernorm.weight

Where experts differ by layer, Hugging Face's names begin with `model.` instead of `backbone.`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.tensors import hf_root, rows_of, symbol_sizes

#: What is counted as active, from the narrowest to the widest.
ACTIVE_CONVENTIONS = ("without_embeddings", "with_output_layer", "with_embeddings")


@dataclass(frozen=True)
class StoredTensor:
    """Tensors of one name and shape in one layer."""

    #: Hugging Face name below `backbone.layers.N.`; `{e}` is the number of the expert.
    name: str
    shape: tuple[int, ...]
    #: How many there are in the layer: the number of experts, or 1.
    copies: int = 1
    #: How many of them one token is multiplied with: top-k for experts, 0 for the expert bias, or 1.
    active_copies: int = 1
    #: False for the FP32 expert bias, which the router updates and no gradient reaches.
    trainable: bool = True
    #: The linear of the precision recipe that holds it; None for vectors.
    linear: str | None = None

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return prod(self.shape) * self.copies

    @property
    def active_elements(self) -> int:
        """Elements of the copies that one token is multiplied with."""
        return prod(self.shape) * self.active_copies


@lru_cache(maxsize=1024)
def part_tensors(config: Nemotron3Config, part: str) -> tuple[StoredTensor, ...]:
    """The Hugging Face tensors of a part of the table of tensors (`tensors.Row.part`)."""
    sizes, topk = symbol_sizes(config), config.moe_router_topk or 0
    return tuple(
        StoredTensor(
            name=tensor.name,
            shape=tuple(sizes[symbol] for symbol in tensor.shape),
            copies=sizes["experts"] if row.routed else 1,
            active_copies=0 if not row.trainable else topk if row.routed else 1,
            trainable=row.trainable,
            linear=row.linear,
        )
        for row in rows_of(config, part)
        for tensor in row.hf
    )


def layer_tensors(config: Nemotron3Config, kind: str) -> tuple[StoredTensor, ...]:
    """The tensors of one layer of kind "M", "*", "E" or "-", its norm first."""
    _pattern.validate(kind)
    return part_tensors(config, kind)


def layer_parameters(config: Nemotron3Config, kind: str) -> int:
    """Elements of one layer of that kind, the expert bias included."""
    return sum(tensor.elements for tensor in layer_tensors(config, kind))


def active_layer_parameters(config: Nemotron3Config, kind: str) -> int:
    """Elements of one layer of that kind that one token is multiplied with (expert bias excluded)."""
    return sum(tensor.active_elements for tensor in layer_tensors(config, kind))


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


def decoder_layers(config: Nemotron3Config) -> list[tuple[str, Nemotron3Config, int]]:
    """Kind and config of the decoder's layers, and how many are alike, in the order of the first of each."""
    alike = Counter((kind, config.at(layer)) for layer, kind in enumerate(config.pattern))
    return [(kind, at, number) for (kind, at), number in alike.items()]


def mtp_tensors(config: Nemotron3Config) -> tuple[StoredTensor, ...]:
    """Tensors of an MTP block outside its layers."""
    return part_tensors(config, "mtp_in") + part_tensors(config, "mtp_out")


def elements_outside_layers(config: Nemotron3Config) -> dict[str, int]:
    """Linear of the precision recipe -> elements of its matrix: "embedding", "output_layer" and "mtp" (of one
    block, its layers left out)."""
    outside = part_tensors(config, "model") + mtp_tensors(config)
    return {tensor.linear: tensor.elements for tensor in outside if tensor.linear}


@dataclass(frozen=True)
class ParameterCount:
    """Elements of a model by part. A checkpoint stores `stored`, an optimizer trains `trainable`."""

    #: Decoder elements by layer kind, expert bias included; kinds the model lacks are absent.
    layers: dict[str, int]
    embedding: int
    output_layer: int
    final_norm: int
    #: The stored MTP blocks, expert bias included; 0 when not counted.
    mtp: int
    #: FP32 expert bias elements within `layers` and `mtp`.
    expert_bias: int
    #: Elements of the decoder layers and the final norm that one token is multiplied with.
    active_layers: int

    @property
    def stored(self) -> int:
        """Elements in a checkpoint."""
        return sum(self.layers.values()) + self.embedding + self.output_layer + self.final_norm + self.mtp

    @property
    def trainable(self) -> int:
        """Elements an optimizer updates: all but the expert bias."""
        return self.stored - self.expert_bias

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tensors of a released checkpoint: BF16, but FP32 for the expert bias."""
        return 2 * self.stored + 2 * self.expert_bias

    @property
    def active(self) -> dict[str, int]:
        """Active parameters under each of `ACTIVE_CONVENTIONS`, MTP and expert bias excluded."""
        with_output = self.active_layers + self.output_layer
        values = (self.active_layers, with_output, with_output + self.embedding)
        return dict(zip(ACTIVE_CONVENTIONS, values, strict=True))


def count(config: Nemotron3Config, *, mtp: bool = True) -> ParameterCount:
    """Count the parameters of a model in closed form, with its stored MTP blocks or without.

    Blocks that training applies at several depths (`mtp_use_repeated_layer`) are stored and counted once.
    """
    decoder = decoder_layers(config)
    kinds = [kind for kind, number in _pattern.count(config.pattern).items() if number]
    blocks = config.mtp_num_blocks if mtp else 0
    mtp_layers = (config.mtp_pattern or "") * blocks
    embedding, final_norm, output_layer = (tensor.elements for tensor in part_tensors(config, "model"))
    return ParameterCount(
        layers={
            kind: sum(number * layer_parameters(at, kind) for k, at, number in decoder if k == kind)
            for kind in kinds
        },
        embedding=embedding,
        output_layer=output_layer,
        final_norm=final_norm,
        mtp=sum(layer_parameters(config, kind) for kind in mtp_layers)
        + blocks * sum(tensor.elements for tensor in mtp_tensors(config)),
        expert_bias=sum(
            tensor.elements
            for kind in config.pattern + mtp_layers
            for tensor in layer_tensors(config, kind)
            if not tensor.trainable
        ),
        active_layers=final_norm
        + sum(number * active_layer_parameters(at, kind) for kind, at, number in decoder),
    )


def stored_tensors(config: Nemotron3Config, *, mtp: bool = True) -> int:
    """Number of tensors in the model's Hugging Face checkpoint."""
    blocks = config.mtp_num_blocks if mtp else 0
    parts = ["model", *config.pattern, *("mtp_in", *(config.mtp_pattern or ""), "mtp_out") * blocks]
    return sum(tensor.copies for part in parts for tensor in part_tensors(config, part))


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
