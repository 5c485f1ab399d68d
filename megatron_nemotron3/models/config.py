"""One frozen dataclass that holds everything that defines a Nemotron 3 model.

Fields have the names of Megatron-Core (`TransformerConfig`, `--hybrid-layer-pattern`). Everything else in
this package (flags, parameter counts, specs, checkpoint names, documentation tables) is derived from an
instance of this class.

Every layer is one residual block with one mixer, `x <- x + mixer(RMSNorm(x))`:

    M  Mamba-2          *  grouped-query attention
    E  mixture of experts   -  dense MLP

    E with a latent size l (LatentMoE, arXiv 2601.18089):

        x [d] --router--> top-k of N experts          (router sees d)
        x [d] --fc1_latent--> z [l] --experts--> [l] --fc2_latent--> [d]
        x [d] --shared expert-----------------------------------> [d]   (added)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from megatron_nemotron3.models import pattern as _pattern

#: Width of the convolution in Megatron's Mamba-2 mixer, which no flag changes.
MAMBA_CONV_KERNEL = 4
#: Epsilon of the gated norm in Megatron's Mamba-2 mixer, whatever `--norm-epsilon` is.
GATED_NORM_EPSILON = 1e-5
#: Fields for which Megatron's Mamba-2 mixer has a fixed value. All norms of a model share one epsilon, so
#: that of the gated norm is the only one that can be built.
BUILT: dict[str, int | float] = {
    "mamba_conv_kernel": MAMBA_CONV_KERNEL,
    "layernorm_epsilon": GATED_NORM_EPSILON,
}

_MoELayers = tuple[tuple[int, int], ...]

#: Type of a field -> the Python types of its values, and what to call it.
_TYPES = {"int": ((int,), "an integer"), "float": ((int, float), "a number"), "str": ((str,), "text")}
#: Fields that may be zero; all other numbers are positive.
_MAY_BE_ZERO = (
    "mtp_num_layers",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "mtp_loss_scaling_factor",
    "init_method_std",
)


def _require_value(model: str, field: str, annotation: str, value: object) -> None:
    """Raise ValueError unless a field has a value of its type: a whole number, a finite number, text."""
    kind, _, optional = annotation.partition(" | ")
    if optional and value is None:
        return
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{model}: {field}={value!r} is not true or false")
        return
    types, what = _TYPES[kind]
    if not isinstance(value, types) or isinstance(value, bool):
        raise ValueError(f"{model}: {field}={value!r} is not {what}")
    if isinstance(value, (int, float)):
        zero = field in _MAY_BE_ZERO
        # Compared as it is: an integer of 400 digits has no float.
        if not 0 <= value < 1 << 63 or (value == 0 and not zero):
            number = "a positive number or 0" if zero else "a positive number"
            raise ValueError(f"{model}: {field}={str(value)[:40]}: give {number} below 2^63")
        if value > (most := MOST.get(field, value)):
            raise ValueError(f"{model}: {field}={value:,}: the tables of a model have at most {most:,}")


#: Most of what tables are made of, ten times what the largest published models have.
MOST = {"num_moe_experts": 16_384, "mtp_num_layers": 64}


def _read_moe_layers(model: str, pattern: str, experts: int | None, value: object) -> _MoELayers:
    """Check `moe_layers` and return it as tuples."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(
            f"{model}: moe_layers={value!r}: give a pair (FFN width, experts per token) per E layer"
        )
    rows = []
    for number, row in enumerate(value):
        whole = isinstance(row, (list, tuple)) and len(row) == 2 and all(type(size) is int for size in row)
        if not whole or not all(0 < size < 1 << 63 for size in row):
            raise ValueError(
                f"{model}: moe_layers[{number}]={row!r}: give two positive integers, the FFN width of an "
                "expert and the experts per token"
            )
        if experts is not None and row[1] > experts:
            raise ValueError(
                f"{model}: moe_layers[{number}]: {row[1]} experts per token exceed num_moe_experts={experts}"
            )
        rows.append((row[0], row[1]))
    if len(rows) != pattern.count("E"):
        raise ValueError(
            f"{model}: moe_layers has {len(rows)} rows, but pattern has {pattern.count('E')} E layers: give "
            "one for each, in their order"
        )
    return tuple(rows)


@lru_cache(maxsize=4096)
def _with_experts(config: Nemotron3Config, row: tuple[int, int]) -> Nemotron3Config:
    return config.but(moe_ffn_hidden_size=row[0], moe_router_topk=row[1], moe_layers=None)


def unbuilt_fields(config: Nemotron3Config) -> frozenset[str]:
    """Fields of which no layer is built: sizes of MTP's experts, if E layers differ and MTP has none."""
    if config.moe_layers is None or "E" in (config.mtp_pattern or ""):
        return frozenset()
    return frozenset(("moe_ffn_hidden_size", "moe_router_topk"))


@dataclass(frozen=True, kw_only=True)
class Nemotron3Config:
    """The numbers of one model. Sizes are in elements; None means that the model lacks the part.

    Raises:
        ValueError: the pattern is invalid, or the sizes of one of its layer kinds are missing or
            inconsistent. The message names the field, the numbers and the cure.
    """

    #: Catalog key, lower case with dashes: "super".
    name: str
    #: Full name: "Nemotron 3 Super 120B-A12B".
    title: str
    #: Layer kinds of the decoder, one character per layer, without pipeline cuts or MTP.
    pattern: str

    hidden_size: int
    vocab_size: int = 131072
    #: Training sequence length of the published recipe, in tokens.
    seq_length: int = 8192
    #: Longest position that the published model supports.
    max_position_embeddings: int = 262144

    # Attention (*)
    num_attention_heads: int
    num_query_groups: int
    #: Head dimension; not hidden_size / heads in this family.
    kv_channels: int = 128

    # Mamba-2 (M)
    mamba_num_heads: int
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    mamba_num_groups: int = 8
    mamba_conv_kernel: int = MAMBA_CONV_KERNEL
    mamba_chunk_size: int = 128

    # Dense MLP (-)
    #: None for models without dense layers.
    dense_ffn_hidden_size: int | None = None

    # Mixture of experts (E)
    num_moe_experts: int | None = None
    moe_router_topk: int | None = None
    #: FFN width of one routed expert.
    moe_ffn_hidden_size: int | None = None
    #: FFN width of the one fused shared expert.
    moe_shared_expert_intermediate_size: int | None = None
    #: Input and output width of the routed experts (LatentMoE); None: the hidden size.
    moe_latent_size: int | None = None
    #: RMSNorm of the latent width before `fc2_latent_proj` (normalized LatentMoE; Megatron-LM #6879).
    moe_use_norm_before_up_proj: bool = False
    moe_router_topk_scaling_factor: float | None = None
    #: (FFN width of an expert, experts per token) of each E layer of `pattern`, in their order, where the
    #: layers differ; None: moe_ffn_hidden_size and moe_router_topk in all. MTP's layers always have these.
    moe_layers: _MoELayers | None = None
    moe_aux_loss_coeff: float = 1e-4
    moe_router_bias_update_rate: float = 1e-3

    # Multi-token prediction
    #: Layer kinds of one MTP block ("*E"); None: no MTP.
    mtp_pattern: str | None = None
    #: Number of times an MTP block is applied in training (prediction depths).
    mtp_num_layers: int = 0
    #: One physical block applied at every depth (`--mtp-use-repeated-layer`).
    mtp_use_repeated_layer: bool = True
    mtp_loss_scaling_factor: float = 0.1

    #: Normalization epsilon of every RMSNorm.
    layernorm_epsilon: float = 1e-5
    #: Standard deviation of N(0, std); output projections use std / sqrt(num_layers) (Megatron's rule for
    #: hybrid models). The published values all equal sqrt(0.8 / hidden_size) to the digits given.
    init_method_std: float

    # Published figures, for tests and documentation; None where no source states them.
    published_total: str | None = None
    published_active: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name != "moe_layers":
                _require_value(self.name, one.name, str(one.type), getattr(self, one.name))
        _pattern.validate(self.pattern)
        kinds = set(self.pattern)
        if self.mtp_pattern is not None:
            _pattern.validate(self.mtp_pattern)
            kinds |= set(self.mtp_pattern)
        if (self.mtp_pattern is None) != (self.mtp_num_layers == 0):
            raise ValueError(
                f"{self.name}: mtp_pattern={self.mtp_pattern!r} and mtp_num_layers={self.mtp_num_layers} "
                "contradict each other: give both, or neither"
            )
        if "E" in kinds:
            for field in (
                "num_moe_experts",
                "moe_router_topk",
                "moe_ffn_hidden_size",
                "moe_shared_expert_intermediate_size",
                "moe_router_topk_scaling_factor",
            ):
                if getattr(self, field) is None:
                    raise ValueError(f"{self.name}: pattern has E layers but {field} is missing")
            if self.moe_router_topk > self.num_moe_experts:  # type: ignore[operator]
                raise ValueError(
                    f"{self.name}: moe_router_topk={self.moe_router_topk} exceeds "
                    f"num_moe_experts={self.num_moe_experts}"
                )
        if self.moe_use_norm_before_up_proj and not self.moe_latent_size:
            raise ValueError(f"{self.name}: moe_use_norm_before_up_proj needs moe_latent_size")
        if self.moe_layers is not None:
            rows = _read_moe_layers(self.name, self.pattern, self.num_moe_experts, self.moe_layers)
            object.__setattr__(self, "moe_layers", rows)
        if "-" in kinds and self.dense_ffn_hidden_size is None:
            raise ValueError(f"{self.name}: pattern has - layers but dense_ffn_hidden_size is missing")
        if self.mamba_num_heads % self.mamba_num_groups:
            raise ValueError(
                f"{self.name}: mamba_num_heads={self.mamba_num_heads} is not divisible by "
                f"mamba_num_groups={self.mamba_num_groups}"
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"{self.name}: num_attention_heads={self.num_attention_heads} is not divisible by "
                f"num_query_groups={self.num_query_groups}"
            )

    def at(self, layer: int) -> Nemotron3Config:
        """The config of decoder layer `layer` (0-based, of `pattern`): this one, or a copy with the
        `moe_ffn_hidden_size` and `moe_router_topk` of that layer, and `moe_layers` None.

        Raises:
            IndexError: there is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"{self.name} has {self.num_layers} layers, so none has number {layer}")
        if self.moe_layers is None or self.pattern[layer] != "E":
            return self
        return _with_experts(self, self.moe_layers[self.pattern.count("E", 0, layer)])

    @property
    def expert_sizes(self) -> _MoELayers:
        """(FFN width of an expert, experts per token) of each E layer of the decoder, in their order."""
        if self.moe_layers is not None:
            return self.moe_layers
        own = (self.moe_ffn_hidden_size or 0, self.moe_router_topk or 0)
        return (own,) * self.pattern.count("E")

    @property
    def num_layers(self) -> int:
        """Decoder layers, MTP not counted."""
        return len(self.pattern)

    @property
    def is_moe(self) -> bool:
        """Whether any layer, MTP included, is a mixture of experts."""
        return "E" in self.pattern + (self.mtp_pattern or "")

    @property
    def has_mtp(self) -> bool:
        """Whether the model trains multi-token-prediction heads."""
        return self.mtp_num_layers > 0

    @property
    def mtp_num_blocks(self) -> int:
        """Physical MTP blocks stored in a checkpoint (HF: `num_nextn_predict_layers`)."""
        return min(1, self.mtp_num_layers) if self.mtp_use_repeated_layer else self.mtp_num_layers

    @property
    def mamba_inner_size(self) -> int:
        """Width of x and z inside a Mamba-2 mixer: heads * head_dim."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def ffn_hidden_size(self) -> int:
        """The value of `--ffn-hidden-size`: the dense MLP width, or the expert width if there is none."""
        # Megatron requires a number also for a pattern of M and * only.
        return self.dense_ffn_hidden_size or self.moe_ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_input_size(self) -> int:
        """Input and output width of a routed expert: the latent size, or the hidden size without one."""
        return self.moe_latent_size or self.hidden_size

    @property
    def full_pattern(self) -> str:
        """The value of `--hybrid-layer-pattern` before pipeline cuts: decoder, then `/` per MTP depth."""
        return self.pattern + f"/{self.mtp_pattern}" * self.mtp_num_layers

    def require_built(self) -> None:
        """Raise ValueError if a field differs from the fixed value of Megatron's Mamba-2 mixer (`BUILT`)."""
        for field, built in BUILT.items() if "M" in self.full_pattern else ():
            if getattr(self, field) != built:
                raise ValueError(
                    f"{self.name}: {field}={getattr(self, field)}: Megatron builds Mamba-2 with {built} only"
                )

    def require_in_hf(self) -> None:
        """Raise ValueError if models of Hugging Face and engines that read their folders lack a part."""
        if self.moe_use_norm_before_up_proj:
            raise ValueError(
                f"{self.name}: moe_use_norm_before_up_proj=True: no model of Hugging Face or of an engine "
                "has this norm, and without it the results are others: keep Megatron's folder"
            )

    def to_json(self) -> str:
        """The fields as JSON text for `models.command.from_json`."""
        return json.dumps(vars(self), indent=2)

    def but(self, **changes: Any) -> Nemotron3Config:
        """A copy with some fields changed (and validated again)."""
        return replace(self, **changes)


#: Fields that are no whole numbers.
FLOATS = frozenset(one.name for one in fields(Nemotron3Config) if str(one.type).startswith("float"))
