"""Options and layouts that are fine one by one and wrong together. Standard library only."""

from __future__ import annotations

from megatron_nemotron3.args.rule import Context, Rule

_MTP = "megatron/core/transformer/multi_token_prediction.py"

#: Options under which some tokens of a sequence do not count in the loss.
_MASKING = ("--sft", "--eod-mask-loss", "--rl-use-sequence-packing")
#: Share by which the weight of MTP's loss may be off on a rank without a word.
_TOLERATED = 1e-2
_PER_TOKEN = "--calculate-per-token-loss"
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def _mtp_error(c: Context) -> float:
    """By how much rank 0, which has the end of every sequence, weighs MTP too heavily."""
    held, depth = c.seq_length / c.layout.cp, c.config.mtp_num_layers
    if held <= depth:
        return 1.0
    return (held / (held - depth)) / (c.seq_length / (c.seq_length - depth)) - 1


def _several_buckets(c: Context) -> str:
    """Why gradients lie in more than one bucket, or ""."""
    if c.backend != "torch" or "--overlap-grad-reduce" in c.options:
        return "--overlap-grad-reduce"
    if c.config.has_mtp and c.layout.pp > 1:
        return f"the embedding that MTP shares over PP={c.layout.pp}"
    return ""


COMBINATION_RULES: tuple[Rule, ...] = (
    Rule(
        "mtp-cp",
        lambda c: c.config.has_mtp and c.layout.cp > 1 and _mtp_error(c) > _TOLERATED,
        lambda c: (
            f"MTP with CP={c.layout.cp}: Megatron weighs the MTP loss by each rank's own tokens; its "
            f"gradients are off by up to {_mtp_error(c):.1g} at seq_length={c.seq_length}. Use cp=1 to have "
            "them right"
        ),
        _MTP,
        "warning",
    ),
    Rule(
        "masked-mtp-cp",
        lambda c: c.config.has_mtp and c.layout.cp > 1 and c.first_of(*_MASKING),
        lambda c: (
            f"{c.first_of(*_MASKING)} with MTP and CP={c.layout.cp}: ranks hold different numbers of tokens "
            "that count, and Megatron weighs the MTP loss by each rank's own: use cp=1"
        ),
        _MTP,
    ),
    Rule(
        "masked-mean-cp",
        lambda c: (
            c.layout.cp > 1 and c.first_of(*_MASKING) and not c.config.has_mtp and _PER_TOKEN not in c.options
        ),
        lambda c: (
            f"{c.first_of(*_MASKING)} with CP={c.layout.cp}: ranks hold different numbers of tokens that "
            f"count, and each takes the mean of its own: add {_PER_TOKEN}"
        ),
        "megatron/core/pipeline_parallel/schedules.py",
    ),
    Rule(
        "reshardable-buckets",
        lambda c: _RESHARDABLE in c.options and _several_buckets(c),
        lambda c: (
            f"{_RESHARDABLE} with gradients in several buckets ({_several_buckets(c)}): megatron-core 0.19 "
            "saves an optimizer state shifted by the padding between them; drop it and resume at the same "
            "TP and PP, or keep one bucket"
        ),
        "megatron/core/optimizer/distrib_optimizer.py; Megatron-LM #5077",
    ),
)
