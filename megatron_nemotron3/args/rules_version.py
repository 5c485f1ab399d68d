"""What one version of megatron-core cannot and another can. Standard library only.

The other rules were read off and tried on 0.19; these compare with the version that the flags are for.
"""

from __future__ import annotations

from megatron_nemotron3.args.rule import Context, Rule
from megatron_nemotron3.versions import CHANGES, DEFAULT, has, unknown_options


def _lacks(change: str, c: Context) -> bool:
    return not has(change, c.megatron_core)


def _since(change: str) -> str:
    return CHANGES[change].since


def _unknown(c: Context) -> dict[str, str]:
    return unknown_options(c.options, c.megatron_core)


def _aux_share(c: Context) -> int:
    """By how much too small the load-balancing loss is before it was mended."""
    per_token = c.config.has_mtp or "--calculate-per-token-loss" in c.options
    if not (c.config.is_moe and per_token):
        return 1
    return (c.schedule.micro_batch_size if c.schedule else 1) * c.layout.tp * c.layout.cp


VERSION_RULES: tuple[Rule, ...] = (
    Rule(
        "option-of-another-version",
        _unknown,
        lambda c: (
            f"the parser of megatron-core {c.megatron_core} stops at "
            + ", ".join(f"{name} ({why})" for name, why in _unknown(c).items())
            + ": drop it, or use a version that has it"
        ),
        "megatron/training/arguments.py",
    ),
    Rule(
        "full-recompute-ignored",
        lambda c: _lacks("full-recompute", c) and c.options.get("--recompute-granularity") == ("full",),
        lambda c: (
            f"--recompute-granularity full: megatron-core {c.megatron_core} recomputes no layer of a hybrid "
            f"and does not say so; use selective, or megatron-core >= {_since('full-recompute')}"
        ),
        CHANGES["full-recompute"].source,
    ),
    Rule(
        "mtp-full-recompute",
        lambda c: (
            not _lacks("full-recompute", c)
            and _lacks("mtp-full-recompute", c)
            and c.config.has_mtp
            and c.options.get("--recompute-granularity") == ("full",)
        ),
        lambda c: (
            f"--recompute-granularity full with {c.config.mtp_num_layers} MTP depths: megatron-core "
            f"{c.megatron_core} raises TypeError (padding_mask) in the first forward; use selective, or "
            f"megatron-core >= {_since('mtp-full-recompute')}"
        ),
        CHANGES["mtp-full-recompute"].source,
    ),
    Rule(
        "mtp-batch",
        lambda c: _lacks("mtp-batch", c) and c.config.has_mtp and c.layout.tp > 1 and c.layout.pp > 1,
        lambda c: (
            f"MTP with TP={c.layout.tp} and PP={c.layout.pp}: pretrain_mamba.py of megatron-core "
            f"{c.megatron_core} leaves {c.layout.tp - 1} of {c.layout.tp} TP ranks of the last stage without "
            "tokens; use megatron_nemotron3/pretrain.py, tp=1, pp=1 or megatron-core >= "
            f"{_since('mtp-batch')}"
        ),
        CHANGES["mtp-batch"].source,
        "warning",
    ),
    Rule(
        "aux-loss-scale",
        lambda c: _lacks("aux-loss-scale", c) and _aux_share(c) > 1,
        lambda c: (
            f"--calculate-per-token-loss on megatron-core {c.megatron_core} counts 1/{_aux_share(c)} of the "
            "load-balancing loss (micro batch * TP * CP): use megatron-core >= "
            f"{_since('aux-loss-scale')}, or --moe-aux-loss-coeff "
            f"{_aux_share(c) * c.config.moe_aux_loss_coeff:.6g}"
        ),
        CHANGES["aux-loss-scale"].source,
        "warning",
    ),
    Rule(
        "mtp-without-te",
        lambda c: not _lacks("inference-linear", c) and c.config.has_mtp and c.backend != "te",
        lambda c: (
            f"MTP on megatron-core {c.megatron_core} raises TypeError when it is built on a GPU without "
            f"TransformerEngine: install it, or use megatron-core {DEFAULT}; on a CPU it is mended"
        ),
        CHANGES["inference-linear"].source,
        "warning",
    ),
)
