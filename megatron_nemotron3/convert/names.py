"""The one table of tensor names: Megatron's keys on one side, Hugging Face's on the other.

A row says what a tensor is called on both sides, which shape it has there, and which rule of
`transforms.RULES` joins the two. Names are relative to the layer they stand in; `{e}` is the expert.

    Row("*", (q, k, v), torch_dist: self_attention.linear_qkv.weight, rule qkv, tp column)

Megatron spells one tensor in several ways: a torch_dist key is not always the name of the parameter it
came from, and other versions and specs have other names. Each way is a `Spelling`, the one that
megatron-core 0.19 writes first. A layer's kind comes from the model's pattern, never from a name, because
`pre_mlp_layernorm.weight` is one tensor in an E layer and another in a - layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_nemotron3.models import Nemotron3Config

#: Keys as megatron-core 0.19 writes them with its own hybrid spec: what every row has, and what we write.
TORCH_DIST = "torch_dist"
#: Names in `named_parameters()` of the model, and in the files of legacy mp_rank folders.
PARAMETER = "parameter"


@dataclass(frozen=True)
class Stored:
    """A tensor of the table: name below its layer, and shape in the symbols of `sizes`."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Spelling:
    """One way Megatron stores a row: the tensors, and the rule that makes the row's HF tensors of them."""

    dialect: str
    rule: str
    tensors: tuple[Stored, ...]


@dataclass(frozen=True)
class Row:
    """Tensors that are converted together, because each side is made of the other."""

    #: Layer kind "M", "*", "E", "-"; "model"; or what an MTP block has "mtp_in" front of or "mtp_out" after
    #: its layers (HF files the two under the block's first and last layer).
    part: str
    hf: tuple[Stored, ...]
    spellings: tuple[Spelling, ...]
    #: How a parameter is split over tensor-parallel ranks: "replicated", "column" (axis 0), "row" (axis 1),
    #: "parts" (axis 0, each tensor of the first spelling on its own). Routed experts: over ETP ranks.
    tp: str = "replicated"
    #: FP32 whatever the model's type.
    float32: bool = False
    #: The configuration field without which the model lacks this row.
    needs: str | None = None

    @property
    def routed(self) -> bool:
        """Whether there is one tensor for each routed expert."""
        return "{e}" in self.hf[0].name

    def spelling(self, dialect: str) -> Spelling:
        """The spelling of that dialect; the first where the dialect has no other name for this row."""
        return next((s for s in self.spellings if s.dialect == dialect), self.spellings[0])


def _row(part: str, hf: str, *spellings: str, **fields: object) -> Row:
    """A row from "name [shape]" texts; a spelling is "dialect: rule: name [shape], …"."""
    parsed = []
    for spelling in spellings:
        dialect, rule, tensors = spelling.split(": ")
        parsed.append(Spelling(dialect, rule, _stored(tensors)))
    return Row(part, _stored(hf), tuple(parsed), **fields)  # type: ignore[arg-type]


def _stored(text: str) -> tuple[Stored, ...]:
    found = re.findall(r"(\S+) \[([^]]*)\]", text)
    return tuple(Stored(name, tuple(shape.split())) for name, shape in found)


ROWS: tuple[Row, ...] = (
    _row(
        "model",
        "backbone.embeddings.weight [vocab d]",
        "torch_dist: vocabulary: embedding.word_embeddings.weight [padded_vocab d]",
        tp="column",
    ),
    _row(
        "model",
        "backbone.norm_f.weight [d]",
        "torch_dist: copy: decoder.final_norm.weight [d]",
        "GPT norm: copy: decoder.final_layernorm.weight [d]",
    ),
    _row(
        "model",
        "lm_head.weight [vocab d]",
        "torch_dist: vocabulary: output_layer.weight [padded_vocab d]",
        tp="column",
    ),
    # Mamba-2
    _row(
        "M",
        "norm.weight [d]",
        "torch_dist: copy: mixer.in_proj.layer_norm_weight [d]",
        "separate norm: copy: norm.weight [d]",
    ),
    _row(
        "M",
        "mixer.in_proj.weight [in_proj d]",
        "torch_dist: concat: mixer.in_proj.weight.z [inner d], mixer.in_proj.weight.x [inner d], "
        "mixer.in_proj.weight.B [bc d], mixer.in_proj.weight.C [bc d], mixer.in_proj.weight.dt [heads d]",
        "parameter: copy: mixer.in_proj.weight [in_proj d]",
        tp="parts",
    ),
    _row(
        "M",
        "mixer.conv1d.weight [conv 1 kernel]",
        "torch_dist: concat: mixer.conv1d.weight.x [inner 1 kernel], mixer.conv1d.weight.B [bc 1 kernel], "
        "mixer.conv1d.weight.C [bc 1 kernel]",
        "parameter: copy: mixer.conv1d_weight [conv 1 kernel]",
        "conv1d module: copy: mixer.conv1d.weight [conv 1 kernel]",
        tp="parts",
    ),
    _row(
        "M",
        "mixer.conv1d.bias [conv]",
        "torch_dist: concat: mixer.conv1d.bias.x [inner], mixer.conv1d.bias.B [bc], mixer.conv1d.bias.C [bc]",
        "parameter: copy: mixer.conv1d_bias [conv]",
        "conv1d module: copy: mixer.conv1d.bias [conv]",
        tp="parts",
    ),
    _row("M", "mixer.A_log [heads]", "torch_dist: copy: mixer.A_log [heads]", tp="column"),
    _row("M", "mixer.D [heads]", "torch_dist: copy: mixer.D [heads]", tp="column"),
    _row("M", "mixer.dt_bias [heads]", "torch_dist: copy: mixer.dt_bias [heads]", tp="column"),
    _row("M", "mixer.norm.weight [inner]", "torch_dist: copy: mixer.norm.weight [inner]", tp="column"),
    _row(
        "M",
        "mixer.out_proj.weight [d inner]",
        "torch_dist: copy: mixer.out_proj.weight [d inner]",
        tp="row",
    ),
    # Attention
    _row(
        "*",
        "norm.weight [d]",
        "torch_dist: copy: self_attention.linear_qkv.layer_norm_weight [d]",
        "separate norm: copy: input_layernorm.weight [d]",
    ),
    _row(
        "*",
        "mixer.q_proj.weight [q d], mixer.k_proj.weight [kv d], mixer.v_proj.weight [kv d]",
        "torch_dist: qkv: self_attention.linear_qkv.weight [qkv d]",
        tp="column",
    ),
    _row(
        "*",
        "mixer.o_proj.weight [d q]",
        "torch_dist: copy: self_attention.linear_proj.weight [d q]",
        tp="row",
    ),
    # Mixture of experts
    _row("E", "norm.weight [d]", "torch_dist: copy: pre_mlp_layernorm.weight [d]"),
    _row("E", "mixer.gate.weight [experts d]", "torch_dist: copy: mlp.router.weight [experts d]"),
    _row(
        "E",
        "mixer.gate.e_score_correction_bias [experts]",
        "torch_dist: copy: mlp.router.expert_bias [experts]",
        float32=True,
    ),
    _row(
        "E",
        "mixer.fc1_latent_proj.weight [latent d]",
        "torch_dist: copy: mlp.fc1_latent_proj.weight [latent d]",
        needs="moe_latent_size",
    ),
    _row(
        "E",
        "mixer.fc2_latent_proj.weight [d latent]",
        "torch_dist: copy: mlp.fc2_latent_proj.weight [d latent]",
        needs="moe_latent_size",
    ),
    _row(
        "E",
        "mixer.experts.{e}.up_proj.weight [ffn latent]",
        "torch_dist: stack: mlp.experts.experts.linear_fc1.weight [experts ffn latent]",
        "singleton experts: copy: mlp.experts.experts.{e}.linear_fc1.weight [ffn latent]",
        "parameter: copy: mlp.experts.linear_fc1.weight{e} [ffn latent]",
        "sequential experts: copy: mlp.experts.local_experts.{e}.linear_fc1.weight [ffn latent]",
        tp="column",
    ),
    _row(
        "E",
        "mixer.experts.{e}.down_proj.weight [latent ffn]",
        "torch_dist: stack: mlp.experts.experts.linear_fc2.weight [experts latent ffn]",
        "singleton experts: copy: mlp.experts.experts.{e}.linear_fc2.weight [latent ffn]",
        "parameter: copy: mlp.experts.linear_fc2.weight{e} [latent ffn]",
        "sequential experts: copy: mlp.experts.local_experts.{e}.linear_fc2.weight [latent ffn]",
        tp="row",
    ),
    _row(
        "E",
        "mixer.shared_experts.up_proj.weight [shared d]",
        "torch_dist: copy: mlp.shared_experts.linear_fc1.weight [shared d]",
        tp="column",
    ),
    _row(
        "E",
        "mixer.shared_experts.down_proj.weight [d shared]",
        "torch_dist: copy: mlp.shared_experts.linear_fc2.weight [d shared]",
        tp="row",
    ),
    # Dense MLP
    _row(
        "-",
        "norm.weight [d]",
        "torch_dist: copy: mlp.linear_fc1.layer_norm_weight [d]",
        "separate norm: copy: pre_mlp_layernorm.weight [d]",
    ),
    _row(
        "-",
        "mixer.up_proj.weight [dense d]",
        "torch_dist: copy: mlp.linear_fc1.weight [dense d]",
        tp="column",
    ),
    _row(
        "-",
        "mixer.down_proj.weight [d dense]",
        "torch_dist: copy: mlp.linear_fc2.weight [d dense]",
        tp="row",
    ),
    # Multi-token prediction, besides its layers
    _row("mtp_in", "enorm.weight [d]", "torch_dist: copy: enorm.weight [d]"),
    _row("mtp_in", "hnorm.weight [d]", "torch_dist: copy: hnorm.weight [d]"),
    _row("mtp_in", "eh_proj.weight [d 2d]", "torch_dist: copy: eh_proj.weight [d 2d]", tp="column"),
    _row("mtp_out", "final_layernorm.weight [d]", "torch_dist: copy: final_layernorm.weight [d]"),
)

#: Every way to spell a row, the default first.
DIALECTS = tuple(dict.fromkeys(spelling.dialect for row in ROWS for spelling in row.spellings))


def sizes(config: Nemotron3Config, padded_vocab_size: int | None = None) -> dict[str, int]:
    """The numbers behind the shape symbols of the table; 0 for parts the model lacks."""
    inner, bc = config.mamba_inner_size, config.mamba_num_groups * config.mamba_state_dim
    q, kv = (heads * config.kv_channels for heads in (config.num_attention_heads, config.num_query_groups))
    return {
        "1": 1,
        "d": config.hidden_size,
        "2d": 2 * config.hidden_size,
        "vocab": config.vocab_size,
        "padded_vocab": config.vocab_size if padded_vocab_size is None else padded_vocab_size,
        "inner": inner,
        "bc": bc,
        "heads": config.mamba_num_heads,
        "conv": inner + 2 * bc,
        "in_proj": 2 * inner + 2 * bc + config.mamba_num_heads,
        "kernel": config.mamba_conv_kernel,
        "q": q,
        "kv": kv,
        "qkv": q + 2 * kv,
        "experts": config.num_moe_experts or 0,
        "ffn": config.moe_ffn_hidden_size or 0,
        "latent": config.expert_input_size if config.is_moe else 0,
        "shared": config.moe_shared_expert_intermediate_size or 0,
        "dense": config.dense_ffn_hidden_size or 0,
    }


def rows(config: Nemotron3Config, part: str) -> tuple[Row, ...]:
    """The rows of a part that this model has."""
    return tuple(r for r in ROWS if r.part == part and (r.needs is None or getattr(config, r.needs)))
