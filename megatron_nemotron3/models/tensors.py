"""The table of tensors: every weight of the family, once.

A row says in which kind of layer a tensor stands, what Hugging Face and Megatron call it, its shape on both
sides, the rule that converts one into the other, how tensor parallelism splits it, and which linear of the
precision recipe it belongs to:

    Row("*", (q, k, v), torch_dist: self_attention.linear_qkv.weight, rule qkv, tp column, linear attention)

Everything else is a projection of this table: parameter counts and the inventory of a checkpoint
(`parameters`), conversion (`checkpoints.convert.inventory`, `checkpoints.convert.keys`), the modules of the
precision recipe (`precision.table`), and the memory of a rank (`launch.plan.state`). Names are relative to
the layer; `{e}` stands for the number of a routed expert. Shapes are in the symbols of `symbol_sizes`.

Megatron spells one tensor in several ways: a torch_dist key is not always the name of the parameter it was
saved from, and other versions and specs use other names. Each way is a `Spelling`; the first is the one that
megatron-core 0.19 writes. The kind of a layer comes from the model's pattern, never from a name, because
`pre_mlp_layernorm.weight` is one tensor in an E layer and another in a - layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from megatron_nemotron3.models.config import Nemotron3Config

#: Keys that megatron-core 0.19 writes with its own hybrid spec. Every row has them, and we write them.
TORCH_DIST = "torch_dist"
#: Names in `named_parameters()` of the model, and in Megatron-FSDP's folders.
PARAMETER = "parameter"
#: Names of specs whose Mamba mixer holds its convolution as a module, not as two parameters.
CONV1D_MODULE = "conv1d module"


@dataclass(frozen=True)
class NamedShape:
    """The name of a tensor below its layer, and its shape in symbols."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Spelling:
    """One way Megatron stores a row: its tensors, and the rule that converts them to Hugging Face's."""

    #: The set of names this spelling belongs to; one of `DIALECTS`.
    dialect: str
    #: A key of `checkpoints.convert.transforms.RULES`.
    rule: str
    tensors: tuple[NamedShape, ...]


@dataclass(frozen=True)
class Row:
    """Tensors that are converted together, because each side is made from the other."""

    #: Layer kind "M", "*", "E" or "-"; "model" for tensors outside the layers; "mtp_in" and "mtp_out" for
    #: those of an MTP block before and after its layers (HF files them under its first and last layer).
    part: str
    hf: tuple[NamedShape, ...]
    spellings: tuple[Spelling, ...]
    #: How a parameter is split over tensor-parallel ranks: "replicated", "column" (axis 0), "row" (axis 1),
    #: or "parts" (axis 0, each tensor of the first spelling by itself). Routed experts: over ETP ranks.
    tp: str = "replicated"
    #: Stored in FP32, whatever the model's type.
    float32: bool = False
    #: False for a buffer that no gradient reaches.
    trainable: bool = True
    #: The linear of the precision recipe (`precision.table`) that holds this matrix; None for vectors.
    linear: str | None = None
    #: The configuration field without which the model lacks this row.
    needs: str | None = None
    #: Place in the order in which Megatron registers the parameters of this part, from 1. Rows without one
    #: follow in the order of the table.
    registered: int | None = None

    @property
    def routed(self) -> bool:
        """Whether every routed expert has a copy of this tensor."""
        return "{e}" in self.hf[0].name

    @property
    def modules(self) -> tuple[str, ...]:
        """Megatron's modules that hold this row, relative to the layer: "mlp.experts.linear_fc1"."""
        spellings = [self.spelling(PARAMETER), self.spelling(CONV1D_MODULE, self.spelling(PARAMETER))]
        return tuple(dict.fromkeys(s.tensors[0].name.rpartition(".")[0] for s in spellings))

    def spelling(self, dialect: str, default: Spelling | None = None) -> Spelling:
        """The spelling of a dialect, or `default` (None: the first one) where the dialect has none."""
        return next((s for s in self.spellings if s.dialect == dialect), default or self.spellings[0])


def table_row(part: str, hf: str, *spellings: str, **fields: object) -> Row:
    """A row from "name [shape]" texts; a spelling is "dialect: rule: name [shape], …"."""
    parsed = []
    for spelling in spellings:
        dialect, rule, tensors = spelling.split(": ")
        parsed.append(Spelling(dialect, rule, _named_shapes(tensors)))
    return Row(part, _named_shapes(hf), tuple(parsed), **fields)  # type: ignore[arg-type]


def _named_shapes(text: str) -> tuple[NamedShape, ...]:
    found = re.findall(r"(\S+) \[([^]]*)\]", text)
    return tuple(NamedShape(name, tuple(shape.split())) for name, shape in found)


ROWS: tuple[Row, ...] = (
    table_row(
        "model",
        "backbone.embeddings.weight [vocab d]",
        "torch_dist: vocabulary: embedding.word_embeddings.weight [padded_vocab d]",
        tp="column",
        linear="embedding",
    ),
    table_row(
        "model",
        "backbone.norm_f.weight [d]",
        "torch_dist: copy: decoder.final_norm.weight [d]",
        "GPT norm: copy: decoder.final_layernorm.weight [d]",
    ),
    table_row(
        "model",
        "lm_head.weight [vocab d]",
        "torch_dist: vocabulary: output_layer.weight [padded_vocab d]",
        tp="column",
        linear="output_layer",
    ),
    # Mamba-2
    table_row(
        "M",
        "norm.weight [d]",
        "torch_dist: copy: mixer.in_proj.layer_norm_weight [d]",
        "separate norm: copy: norm.weight [d]",
        registered=6,
    ),
    table_row(
        "M",
        "mixer.in_proj.weight [in_proj d]",
        "torch_dist: concat: mixer.in_proj.weight.z [inner d], mixer.in_proj.weight.x [inner d], "
        "mixer.in_proj.weight.B [bc d], mixer.in_proj.weight.C [bc d], mixer.in_proj.weight.dt [heads d]",
        "parameter: copy: mixer.in_proj.weight [in_proj d]",
        tp="parts",
        linear="mamba_in",
        registered=7,
    ),
    table_row(
        "M",
        "mixer.conv1d.weight [conv 1 kernel]",
        "torch_dist: concat: mixer.conv1d.weight.x [inner 1 kernel], mixer.conv1d.weight.B [bc 1 kernel], "
        "mixer.conv1d.weight.C [bc 1 kernel]",
        "parameter: copy: mixer.conv1d_weight [conv 1 kernel]",
        "conv1d module: copy: mixer.conv1d.weight [conv 1 kernel]",
        tp="parts",
        linear="convolution",
        registered=1,
    ),
    table_row(
        "M",
        "mixer.conv1d.bias [conv]",
        "torch_dist: concat: mixer.conv1d.bias.x [inner], mixer.conv1d.bias.B [bc], mixer.conv1d.bias.C [bc]",
        "parameter: copy: mixer.conv1d_bias [conv]",
        "conv1d module: copy: mixer.conv1d.bias [conv]",
        tp="parts",
        registered=2,
    ),
    table_row("M", "mixer.A_log [heads]", "torch_dist: copy: mixer.A_log [heads]", tp="column", registered=4),
    table_row("M", "mixer.D [heads]", "torch_dist: copy: mixer.D [heads]", tp="column", registered=5),
    table_row(
        "M", "mixer.dt_bias [heads]", "torch_dist: copy: mixer.dt_bias [heads]", tp="column", registered=3
    ),
    table_row("M", "mixer.norm.weight [inner]", "torch_dist: copy: mixer.norm.weight [inner]", tp="column"),
    table_row(
        "M",
        "mixer.out_proj.weight [d inner]",
        "torch_dist: copy: mixer.out_proj.weight [d inner]",
        tp="row",
        linear="mamba_out",
    ),
    # Attention
    table_row(
        "*",
        "norm.weight [d]",
        "torch_dist: copy: self_attention.linear_qkv.layer_norm_weight [d]",
        "separate norm: copy: input_layernorm.weight [d]",
        registered=2,
    ),
    table_row(
        "*",
        "mixer.q_proj.weight [q d], mixer.k_proj.weight [kv d], mixer.v_proj.weight [kv d]",
        "torch_dist: qkv: self_attention.linear_qkv.weight [qkv d]",
        tp="column",
        linear="attention",
    ),
    table_row(
        "*",
        "mixer.o_proj.weight [d q]",
        "torch_dist: copy: self_attention.linear_proj.weight [d q]",
        tp="row",
        linear="attention",
        registered=1,
    ),
    # Mixture of experts
    table_row("E", "norm.weight [d]", "torch_dist: copy: pre_mlp_layernorm.weight [d]"),
    table_row(
        "E",
        "mixer.gate.weight [experts d]",
        "torch_dist: copy: mlp.router.weight [experts d]",
        linear="router",
    ),
    table_row(
        "E",
        "mixer.gate.e_score_correction_bias [experts]",
        "torch_dist: copy: mlp.router.expert_bias [experts]",
        float32=True,
        trainable=False,
    ),
    table_row(
        "E",
        "mixer.fc1_latent_proj.weight [latent d]",
        "torch_dist: copy: mlp.fc1_latent_proj.weight [latent d]",
        needs="moe_latent_size",
        linear="latent",
    ),
    table_row(
        "E",
        "mixer.fc2_norm.weight [latent]",  # a name of ours: no file of Hugging Face has this norm
        "torch_dist: copy: mlp.fc2_norm.weight [latent]",
        needs="moe_use_norm_before_up_proj",
    ),
    table_row(
        "E",
        "mixer.fc2_latent_proj.weight [d latent]",
        "torch_dist: copy: mlp.fc2_latent_proj.weight [d latent]",
        needs="moe_latent_size",
        linear="latent",
    ),
    table_row(
        "E",
        "mixer.experts.{e}.up_proj.weight [ffn latent]",
        "torch_dist: stack: mlp.experts.experts.linear_fc1.weight [experts ffn latent]",
        "singleton experts: copy: mlp.experts.experts.{e}.linear_fc1.weight [ffn latent]",
        "parameter: copy: mlp.experts.linear_fc1.weight{e} [ffn latent]",
        "sequential experts: copy: mlp.experts.local_experts.{e}.linear_fc1.weight [ffn latent]",
        tp="column",
        linear="experts",
    ),
    table_row(
        "E",
        "mixer.experts.{e}.down_proj.weight [latent ffn]",
        "torch_dist: stack: mlp.experts.experts.linear_fc2.weight [experts latent ffn]",
        "singleton experts: copy: mlp.experts.experts.{e}.linear_fc2.weight [latent ffn]",
        "parameter: copy: mlp.experts.linear_fc2.weight{e} [latent ffn]",
        "sequential experts: copy: mlp.experts.local_experts.{e}.linear_fc2.weight [latent ffn]",
        tp="row",
        linear="experts",
    ),
    table_row(
        "E",
        "mixer.shared_experts.up_proj.weight [shared d]",
        "torch_dist: copy: mlp.shared_experts.linear_fc1.weight [shared d]",
        tp="column",
        linear="shared_experts",
    ),
    table_row(
        "E",
        "mixer.shared_experts.down_proj.weight [d shared]",
        "torch_dist: copy: mlp.shared_experts.linear_fc2.weight [d shared]",
        tp="row",
        linear="shared_experts",
    ),
    # Dense MLP
    table_row(
        "-",
        "norm.weight [d]",
        "torch_dist: copy: mlp.linear_fc1.layer_norm_weight [d]",
        "separate norm: copy: pre_mlp_layernorm.weight [d]",
    ),
    table_row(
        "-",
        "mixer.up_proj.weight [dense d]",
        "torch_dist: copy: mlp.linear_fc1.weight [dense d]",
        tp="column",
        linear="mlp",
    ),
    table_row(
        "-",
        "mixer.down_proj.weight [d dense]",
        "torch_dist: copy: mlp.linear_fc2.weight [d dense]",
        tp="row",
        linear="mlp",
    ),
    # Multi-token prediction, besides its layers
    table_row("mtp_in", "enorm.weight [d]", "torch_dist: copy: enorm.weight [d]"),
    table_row("mtp_in", "hnorm.weight [d]", "torch_dist: copy: hnorm.weight [d]"),
    table_row(
        "mtp_in",
        "eh_proj.weight [d 2d]",
        "torch_dist: copy: eh_proj.weight [d 2d]",
        tp="column",
        linear="mtp",
    ),
    table_row("mtp_out", "final_layernorm.weight [d]", "torch_dist: copy: final_layernorm.weight [d]"),
)

#: All sets of spellings, the default first.
DIALECTS = tuple(dict.fromkeys(spelling.dialect for row in ROWS for spelling in row.spellings))


def symbol_sizes(config: Nemotron3Config, padded_vocab_size: int | None = None) -> dict[str, int]:
    """The numbers behind the shape symbols of the table; 0 for parts that the model lacks."""
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


#: What Hugging Face's names in the table begin with.
_ROOT = "backbone"


def hf_root(config: Nemotron3Config) -> str:
    """What Hugging Face's names of the decoder begin with: "backbone", or "model" where experts differ by
    layer (Nemotron Puzzle)."""
    return _ROOT if config.moe_layers is None else "model"


def rows_of(config: Nemotron3Config, part: str) -> tuple[Row, ...]:
    """The rows of a part that this model has, in the order of the table."""
    root = hf_root(config)
    rows = (r for r in ROWS if r.part == part and (r.needs is None or getattr(config, r.needs)))
    return tuple(r if root == _ROOT else _rooted(r, root) for r in rows)


@cache
def _rooted(row: Row, root: str) -> Row:
    named = tuple(NamedShape(re.sub(rf"^{_ROOT}\.", f"{root}.", t.name), t.shape) for t in row.hf)
    return row if named == row.hf else replace(row, hf=named)


def registered(rows: Iterable[Row]) -> list[Row]:
    """Rows of one part in the order in which Megatron registers their parameters."""
    return sorted(rows, key=lambda row: row.registered or len(ROWS))
