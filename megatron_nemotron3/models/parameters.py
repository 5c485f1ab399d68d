"""Parameter counts and the tensor inventory of a checkpoint, in closed form.

One table a layer kind lists its tensors with their Hugging Face names and shapes; every count here is a sum
over these tables. A routed expert is listed once with the number of its copies, so nothing is enumerated.

Active parameters are those one token is multiplied with: all of the model except the routed experts it is
not sent to. Publications differ in what they add to the layers, hence `ACTIVE_CONVENTIONS`:

| convention | counts | reproduces | off by |
|-|-|-|-|
| without_embeddings | layers and final norm | no published figure | |
| with_output_layer | the same and the output layer | Nano 3.2B, Ultra 55B | +0.9 %, -0.03 % |
| with_embeddings | the same and the embedding table | Nano 3.6B, Super 12.7B | -0.6 %, +0.6 % |

Super's 12.77B is published as 12.7B. Without the routers' 84M the count is 12.69B, and the total 120.59B
(published: 120.6B, exact: 120.67B), so its authors may have left the routers out; no source says so.
MTP is not active: it does not run when the next token is predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.config import Nemotron3Config

#: What is counted as active, from the narrowest to the widest.
ACTIVE_CONVENTIONS = ("without_embeddings", "with_output_layer", "with_embeddings")


@dataclass(frozen=True)
class StoredTensor:
    """One row of the inventory: tensors of one name and shape in one layer."""

    #: Hugging Face name below `backbone.layers.N.`; `{e}` is the expert.
    name: str
    shape: tuple[int, ...]
    #: Tensors of this kind in the layer: the number of experts, or 1.
    copies: int = 1
    #: How many of them one token is multiplied with: top-k, or 1.
    active_copies: int = 1
    #: False for the FP32 expert bias, which the router updates and no gradient reaches.
    trainable: bool = True

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return prod(self.shape) * self.copies

    @property
    def active_elements(self) -> int:
        """Elements of the copies one token is multiplied with."""
        return prod(self.shape) * self.active_copies


def _mamba(c: Nemotron3Config) -> tuple[StoredTensor, ...]:
    d, inner, heads = c.hidden_size, c.mamba_inner_size, c.mamba_num_heads
    groups_state = c.mamba_num_groups * c.mamba_state_dim
    conv = inner + 2 * groups_state  # x, B, C
    return (
        StoredTensor("mixer.in_proj.weight", (2 * inner + 2 * groups_state + heads, d)),  # z, x, B, C, dt
        StoredTensor("mixer.conv1d.weight", (conv, 1, c.mamba_conv_kernel)),
        StoredTensor("mixer.conv1d.bias", (conv,)),
        StoredTensor("mixer.A_log", (heads,)),
        StoredTensor("mixer.D", (heads,)),
        StoredTensor("mixer.dt_bias", (heads,)),
        StoredTensor("mixer.norm.weight", (inner,)),
        StoredTensor("mixer.out_proj.weight", (d, inner)),
    )


def _attention(c: Nemotron3Config) -> tuple[StoredTensor, ...]:
    d, q, kv = c.hidden_size, c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    return (
        StoredTensor("mixer.q_proj.weight", (q, d)),
        StoredTensor("mixer.k_proj.weight", (kv, d)),
        StoredTensor("mixer.v_proj.weight", (kv, d)),
        StoredTensor("mixer.o_proj.weight", (d, q)),
    )


def _moe(c: Nemotron3Config) -> tuple[StoredTensor, ...]:
    experts, topk, ffn = c.num_moe_experts, c.moe_router_topk, c.moe_ffn_hidden_size
    shared = c.moe_shared_expert_intermediate_size
    # The config refuses a pattern with E layers that lacks any of these.
    assert experts is not None and topk is not None and ffn is not None and shared is not None
    d, width = c.hidden_size, c.expert_input_size
    latent = (
        StoredTensor("mixer.fc1_latent_proj.weight", (width, d)),
        StoredTensor("mixer.fc2_latent_proj.weight", (d, width)),
    )
    return (
        StoredTensor("mixer.gate.weight", (experts, d)),
        StoredTensor("mixer.gate.e_score_correction_bias", (experts,), trainable=False),
        StoredTensor("mixer.experts.{e}.up_proj.weight", (ffn, width), experts, topk),
        StoredTensor("mixer.experts.{e}.down_proj.weight", (width, ffn), experts, topk),
        StoredTensor("mixer.shared_experts.up_proj.weight", (shared, d)),
        StoredTensor("mixer.shared_experts.down_proj.weight", (d, shared)),
        *(latent if c.moe_latent_size else ()),
    )


def _mlp(c: Nemotron3Config) -> tuple[StoredTensor, ...]:
    d, ffn = c.hidden_size, c.dense_ffn_hidden_size
    assert ffn is not None  # the config refuses a pattern with - layers without it
    return (
        StoredTensor("mixer.up_proj.weight", (ffn, d)),
        StoredTensor("mixer.down_proj.weight", (d, ffn)),
    )


_MIXERS: dict[str, Callable[[Nemotron3Config], tuple[StoredTensor, ...]]] = {
    "M": _mamba,
    "*": _attention,
    "E": _moe,
    "-": _mlp,
}


@lru_cache(maxsize=1024)
def layer_tensors(config: Nemotron3Config, kind: str) -> tuple[StoredTensor, ...]:
    """The tensors of one layer of kind "M", "*", "E" or "-", its norm first.

    Raises:
        ValueError: no such kind.
    """
    _pattern.validate(kind)
    return (StoredTensor("norm.weight", (config.hidden_size,)), *_MIXERS[kind](config))


def layer_parameters(config: Nemotron3Config, kind: str) -> int:
    """Elements one layer of that kind stores, the expert bias included."""
    return sum(tensor.elements for tensor in layer_tensors(config, kind))


def active_layer_parameters(config: Nemotron3Config, kind: str) -> int:
    """Elements of one layer of that kind that one token is multiplied with (expert bias excluded)."""
    return sum(tensor.active_elements for tensor in layer_tensors(config, kind) if tensor.trainable)


def _mtp_tensors(c: Nemotron3Config) -> tuple[StoredTensor, ...]:
    """What an MTP block has besides its layers."""
    d = c.hidden_size
    return (
        StoredTensor("eh_proj.weight", (d, 2 * d)),
        StoredTensor("enorm.weight", (d,)),
        StoredTensor("hnorm.weight", (d,)),
        StoredTensor("final_layernorm.weight", (d,)),
    )


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
    d, table = config.hidden_size, config.vocab_size * config.hidden_size
    kinds = {kind: number for kind, number in _pattern.count(config.pattern).items() if number}
    blocks = config.mtp_num_blocks if mtp else 0
    inner = (config.mtp_pattern or "") * blocks
    moe_layers = (config.pattern + inner).count("E")
    return ParameterCount(
        layers={kind: number * layer_parameters(config, kind) for kind, number in kinds.items()},
        embedding=table,
        output_layer=table,
        final_norm=d,
        mtp=sum(layer_parameters(config, kind) for kind in inner)
        + blocks * sum(tensor.elements for tensor in _mtp_tensors(config)),
        expert_bias=moe_layers * (config.num_moe_experts or 0),
        active_layers=d + sum(n * active_layer_parameters(config, kind) for kind, n in kinds.items()),
    )


def stored_tensors(config: Nemotron3Config, *, mtp: bool = True) -> int:
    """Number of tensors in the model's Hugging Face checkpoint."""
    blocks = config.mtp_num_blocks if mtp else 0
    kinds = config.pattern + (config.mtp_pattern or "") * blocks
    in_layers = sum(
        number * sum(tensor.copies for tensor in layer_tensors(config, kind))
        for kind, number in _pattern.count(kinds).items()
        if number
    )
    return in_layers + blocks * len(_mtp_tensors(config)) + 3  # embedding, final norm, output layer
