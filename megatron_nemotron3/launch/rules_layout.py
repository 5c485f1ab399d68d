"""Rules on layouts: divisibility, and sizes that exclude each other."""

from __future__ import annotations

from math import gcd

from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.rule import ARGUMENTS, CONFIG, Rule, divisors
from megatron_nemotron3.models.config import GATED_NORM_EPSILON, MAMBA_CONV_KERNEL

_MIXER = "megatron/core/ssm/mamba_mixer.py"
_MAMBA_CP = "megatron/core/ssm/mamba_context_parallel.py"
_LINEAR = "megatron/core/tensor_parallel/layers.py"
_STATE = "megatron/core/parallel_state.py"


def _split_rule(name: str, field: str, size: str, kind: str | None, source: str) -> Rule:
    """`config.field` must be divisible by `layout.size` in a model with layers of that kind (None: any)."""

    def whole(c: Launch) -> int | None:
        value: int | None = getattr(c.config, field)
        return value

    def violated(c: Launch) -> bool:
        return (kind is None or kind in c.kinds) and (whole(c) or 0) % getattr(c.layout, size) != 0

    def message(c: Launch) -> str:
        return (
            f"{field}={whole(c)} is not divisible by {size.upper()}={getattr(c.layout, size)}: "
            f"use {size.upper()} {divisors(whole(c) or 1, 64)}"
        )

    return Rule(name, violated, message, source)


def _rank_groups(c: Launch) -> int:
    return c.config.mamba_num_groups // c.layout.tp


def _mamba_cp_groups(c: Launch) -> bool:
    """Whether neither count divides the other: CP splits the groups, or the heads of a group."""
    groups, cp = _rank_groups(c), c.layout.cp
    if "M" not in c.kinds or groups == 0:  # rule mamba-groups-tp reports it
        return False
    return (cp % groups if groups < cp else groups % cp) != 0


def _kv_groups(c: Launch) -> bool:
    # With fewer groups than ranks Megatron gathers the QKV activations, and every rank keeps the group that
    # its query heads need. Ultra ran this way (2 groups at TP 8).
    groups, tp = c.config.num_query_groups, c.layout.tp
    return groups % tp != 0 and tp % groups != 0


def _qkv_rows(c: Launch) -> int:
    return (c.config.num_attention_heads + 2 * c.config.num_query_groups) * c.config.kv_channels


def _dense_ranks(c: Launch) -> int:
    return c.layout.tp * c.layout.cp * c.layout.dp


def _expert_widths(c: Launch) -> list[int]:
    """Return the FFN widths of routed experts, MTP's included, which layers may have of their own."""
    own = [c.config.moe_ffn_hidden_size or 0] if "E" in (c.config.mtp_pattern or "") else []
    return sorted({*own, *(width for width, _ in c.config.expert_sizes)})


LAYOUT_RULES: tuple[Rule, ...] = (
    Rule(
        "pattern-dash",
        # A dash alone is a value to argparse.
        lambda c: c.config.pattern.startswith("-") and c.config.full_pattern != "-",
        lambda c: (
            f"pattern={c.config.pattern!r} starts with '-', so Megatron's parser reads it as an option: "
            "start the pattern with M, * or E"
        ),
        ARGUMENTS,
    ),
    _split_rule("heads-tp", "num_attention_heads", "tp", None, CONFIG),
    Rule(
        "query-groups-tp",
        _kv_groups,
        lambda c: (
            f"num_query_groups={c.config.num_query_groups} and TP={c.layout.tp}: one must divide the other; "
            f"use TP {divisors(c.config.num_query_groups)} or a multiple of {c.config.num_query_groups}"
        ),
        f"{CONFIG}; below TP the groups are gathered (megatron/core/transformer/attention.py)",
    ),
    Rule(
        "qkv-tp",
        # If each rank has a whole number of groups, TP also divides the rows.
        lambda c: (
            "*" in c.kinds
            and not c.config.num_attention_heads % c.layout.tp
            and not _kv_groups(c)
            and _qkv_rows(c) % c.layout.tp
        ),
        lambda c: (
            f"the QKV projection (num_attention_heads={c.config.num_attention_heads}, num_query_groups="
            f"{c.config.num_query_groups}, kv_channels={c.config.kv_channels}) has {_qkv_rows(c)} rows, not "
            f"divisible by TP={c.layout.tp}: use TP {divisors(c.config.num_query_groups)}"
        ),
        _LINEAR,
    ),
    _split_rule("mamba-heads-tp", "mamba_num_heads", "tp", "M", _MIXER),
    _split_rule("mamba-groups-tp", "mamba_num_groups", "tp", "M", _MIXER),
    _split_rule("dense-ffn-tp", "dense_ffn_hidden_size", "tp", "-", _LINEAR),
    _split_rule("shared-expert-tp", "moe_shared_expert_intermediate_size", "tp", "E", _LINEAR),
    Rule(
        "expert-ffn-etp",
        lambda c: any(width % c.layout.etp for width in _expert_widths(c)),
        lambda c: (
            f"moe_ffn_hidden_size={next(w for w in _expert_widths(c) if w % c.layout.etp)} is not divisible "
            f"by ETP={c.layout.etp}: use ETP {divisors(gcd(*_expert_widths(c)), 64)}"
        ),
        _LINEAR,
    ),
    _split_rule("experts-ep", "num_moe_experts", "ep", "E", ARGUMENTS),
    Rule(
        "mtp-hidden-tp",
        lambda c: c.config.has_mtp and c.config.hidden_size % c.layout.tp,
        lambda c: (
            f"hidden_size={c.config.hidden_size} is not divisible by TP={c.layout.tp}, but MTP's "
            f"eh_proj splits its output over TP ranks: use TP {divisors(c.config.hidden_size, 64)}"
        ),
        "megatron/core/transformer/multi_token_prediction.py",
    ),
    Rule(
        "vocabulary-tp",
        lambda c: c.config.vocab_size % c.layout.tp,
        lambda c: (
            f"vocab_size={c.config.vocab_size} is not divisible by TP={c.layout.tp}: Megatron pads the "
            "vocabulary, and an export must trim the padding"
        ),
        "megatron/training/vocab_utils.py",
        "warning",
    ),
    Rule(
        "mamba-heads-cp",
        lambda c: "M" in c.kinds and c.config.mamba_num_heads // c.layout.tp % c.layout.cp,
        lambda c: (
            f"mamba_num_heads={c.config.mamba_num_heads} at TP={c.layout.tp} leaves "
            f"{c.config.mamba_num_heads // c.layout.tp} heads per rank, not divisible by CP={c.layout.cp}: "
            f"use CP {divisors(max(1, c.config.mamba_num_heads // c.layout.tp))}"
        ),
        _MAMBA_CP,
    ),
    Rule(
        "mamba-groups-cp",
        _mamba_cp_groups,
        lambda c: (
            f"mamba_num_groups={c.config.mamba_num_groups} at TP={c.layout.tp} leaves {_rank_groups(c)} "
            f"groups per rank; neither that number nor CP={c.layout.cp} divides the other: use CP "
            f"{divisors(_rank_groups(c))} or a multiple of {_rank_groups(c)}"
        ),
        _MAMBA_CP,
    ),
    Rule(
        "experts-without-moe",
        lambda c: not c.config.is_moe and c.layout.expert_ranks > 1,
        lambda c: (
            f"{c.config.name} has no MoE layers (E), so EP={c.layout.ep} ETP={c.layout.etp} have no experts "
            "to split: use ep=1, etp=1"
        ),
        ARGUMENTS,
    ),
    Rule(
        "expert-grid",
        lambda c: c.config.is_moe and _dense_ranks(c) % c.layout.expert_ranks,
        lambda c: (
            f"TP*CP*DP={_dense_ranks(c)} ranks per pipeline stage are not divisible by ETP*EP="
            f"{c.layout.expert_ranks}: raise DP to a multiple of {_smallest_dp(c)} or lower EP"
        ),
        _STATE,
    ),
    Rule(
        "layers-pipeline",
        lambda c: c.config.num_layers < c.layout.stages,
        lambda c: (
            f"{c.config.num_layers} layers cannot fill PP*VPP={c.layout.stages} stages: "
            f"use PP*VPP <= {c.config.num_layers}"
        ),
        "megatron/core/models/hybrid/hybrid_layer_allocation.py",
    ),
    Rule(
        "vpp-without-pp",
        lambda c: c.layout.vpp > 1 and c.layout.pp == 1,
        lambda c: f"VPP={c.layout.vpp} interleaves pipeline stages, but PP=1: use vpp=1 or pp >= 2",
        _STATE,
    ),
    Rule(
        "moe-tp-without-sp",
        lambda c: c.config.is_moe and c.layout.tp > 1 and not c.layout.sequence_parallel,
        lambda c: f"MoE layers at TP={c.layout.tp} require sequence parallelism: drop sp=False",
        "megatron/core/transformer/moe/moe_layer.py",
    ),
    Rule(
        "sp-without-tp",
        lambda c: c.layout.sequence_parallel and c.layout.tp == 1,
        lambda c: "sp=True splits the sequence over TP ranks, but TP=1: drop it or use tp >= 2",
        "megatron/core/model_parallel_config.py",
    ),
    Rule(
        "sequence-cp",
        lambda c: c.layout.cp > 1 and c.seq_length % (2 * c.layout.cp),
        lambda c: (
            f"seq_length={c.seq_length} is not divisible by 2*CP={2 * c.layout.cp} (two chunks per rank): "
            f"use a multiple of {2 * c.layout.cp}"
        ),
        ARGUMENTS,
    ),
    Rule(
        "sequence-sp",
        lambda c: c.layout.sequence_parallel and c.seq_length % (c.layout.cp * c.layout.tp),
        lambda c: (
            f"seq_length={c.seq_length} is not divisible by CP*TP={c.layout.cp * c.layout.tp}, but "
            f"sequence parallelism splits it over these ranks: use a multiple of {c.layout.cp * c.layout.tp}"
        ),
        "megatron/core/tensor_parallel/mappings.py",
    ),
    Rule(
        "conv-kernel",
        lambda c: "M" in c.kinds and c.config.mamba_conv_kernel != MAMBA_CONV_KERNEL,
        lambda c: (
            f"mamba_conv_kernel={c.config.mamba_conv_kernel}: Megatron has no option for it and always "
            f"builds {MAMBA_CONV_KERNEL}: use {MAMBA_CONV_KERNEL}"
        ),
        _MIXER,
    ),
    Rule(
        "gated-norm-epsilon",
        lambda c: "M" in c.kinds and c.config.layernorm_epsilon != GATED_NORM_EPSILON,
        lambda c: (
            f"layernorm_epsilon={c.config.layernorm_epsilon}: the gated norm of Mamba-2 has "
            f"{GATED_NORM_EPSILON} whatever --norm-epsilon is, so the norms of one model would differ: use "
            f"{GATED_NORM_EPSILON}"
        ),
        _MIXER,
    ),
)


def _smallest_dp(c: Launch) -> int:
    ranks = c.layout.tp * c.layout.cp
    return next(dp for dp in range(1, c.layout.expert_ranks + 1) if ranks * dp % c.layout.expert_ranks == 0)
