"""The flags that describe a model, one row per flag.

A value of None or False emits no flag, True emits a switch, and a tuple emits several words. `origin` says
where the value comes from: a config field, or "family" for what all models share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_nemotron3.launch.flag import Flag, text
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.stack_specs import MODULE, spec_name

#: The largest divisor Megatron pads the vocabulary to by default (times TP).
VOCAB_DIVISOR = 128


@dataclass(frozen=True)
class ArchitectureRow:
    """A flag, and how to compute its value from a config."""

    flag: str
    value: Callable[[Nemotron3Config], object]
    origin: str


def emit(flag: str, value: object, section: str, origin: str) -> list[Flag]:
    """Return no flag for None and False, a switch for True, one word for a scalar, several for a tuple."""
    if value is None or value is False:
        return []
    values = value if isinstance(value, tuple) else () if value is True else (value,)
    return [Flag(flag, tuple(map(text, values)), section, origin)]


def _field_row(flag: str, field: str) -> ArchitectureRow:
    return ArchitectureRow(flag, lambda config: getattr(config, field), f"config.{field}")


def _family_row(flag: str, value: object = True) -> ArchitectureRow:
    return ArchitectureRow(flag, lambda config: value, "family")


MODEL: tuple[ArchitectureRow, ...] = (
    _field_row("--hidden-size", "hidden_size"),
    _field_row("--ffn-hidden-size", "ffn_hidden_size"),
    _field_row("--num-attention-heads", "num_attention_heads"),
    _family_row("--group-query-attention"),
    _field_row("--num-query-groups", "num_query_groups"),
    _field_row("--kv-channels", "kv_channels"),
    _field_row("--mamba-num-heads", "mamba_num_heads"),
    _field_row("--mamba-head-dim", "mamba_head_dim"),
    _field_row("--mamba-state-dim", "mamba_state_dim"),
    _field_row("--mamba-num-groups", "mamba_num_groups"),
    _family_row("--squared-relu"),
    _family_row("--normalization", "RMSNorm"),
    _field_row("--norm-epsilon", "layernorm_epsilon"),
    _family_row("--disable-bias-linear"),
    _family_row("--untie-embeddings-and-output-weights"),
    _family_row("--position-embedding-type", "none"),
    _field_row("--init-method-std", "init_method_std"),
    _family_row("--attention-dropout", 0.0),
    _family_row("--hidden-dropout", 0.0),
)

MOE: tuple[ArchitectureRow, ...] = (
    _field_row("--num-experts", "num_moe_experts"),
    _field_row("--moe-ffn-hidden-size", "moe_ffn_hidden_size"),
    _field_row("--moe-shared-expert-intermediate-size", "moe_shared_expert_intermediate_size"),
    _field_row("--moe-latent-size", "moe_latent_size"),
    _field_row("--moe-use-norm-before-up-proj", "moe_use_norm_before_up_proj"),
    _field_row("--moe-router-topk", "moe_router_topk"),
    _field_row("--moe-router-topk-scaling-factor", "moe_router_topk_scaling_factor"),
    _family_row("--moe-router-score-function", "sigmoid"),
    _family_row("--moe-router-enable-expert-bias"),
    _field_row("--moe-router-bias-update-rate", "moe_router_bias_update_rate"),
    _family_row("--moe-router-load-balancing-type", "seq_aux_loss"),
    _field_row("--moe-aux-loss-coeff", "moe_aux_loss_coeff"),
)

MTP: tuple[ArchitectureRow, ...] = (
    _field_row("--mtp-num-layers", "mtp_num_layers"),
    _field_row("--mtp-use-repeated-layer", "mtp_use_repeated_layer"),
    _field_row("--mtp-loss-scaling-factor", "mtp_loss_scaling_factor"),
    # As in NVIDIA's one public configuration that trains MTP.
    _family_row("--calculate-per-token-loss"),
)


def vocab_divisor(config: Nemotron3Config, layout: ParallelLayout) -> int | None:
    """Return the `--make-vocab-size-divisible-by` that avoids padding; None if the default of 128 does.

    Megatron pads to a multiple of divisor * TP. It pads a vocabulary that TP does not divide in any case
    (rule "vocabulary-tp").
    """
    per_rank, rest = divmod(config.vocab_size, layout.tp)
    if rest or per_rank % VOCAB_DIVISOR == 0:
        return None
    return next(d for d in range(VOCAB_DIVISOR, 0, -1) if per_rank % d == 0)


def architecture_flags(
    config: Nemotron3Config, layout: ParallelLayout, pattern: str, seq_length: int, backend: str
) -> list[Flag]:
    """Return the flags of section "architecture"."""
    head: tuple[tuple[str, object, str], ...] = (
        ("--spec", (MODULE, spec_name(config, backend)), "backend"),
        ("--hybrid-layer-pattern", pattern, "config.pattern, config.mtp_pattern, layout"),
    )
    tail: tuple[tuple[str, object, str], ...] = (
        ("--make-vocab-size-divisible-by", vocab_divisor(config, layout), "config.vocab_size, layout.tp"),
        ("--seq-length", seq_length, "schedule.seq_length, config.seq_length"),
        # The models have no position embeddings; Megatron only requires at least the sequence length.
        ("--max-position-embeddings", seq_length, "schedule.seq_length, config.seq_length"),
    )
    rows = MODEL + (MOE if config.is_moe else ()) + (MTP if config.has_mtp else ())
    items = (*head, *((row.flag, row.value(config), row.origin) for row in rows), *tail)
    return [flag for name, value, origin in items for flag in emit(name, value, "architecture", origin)]
