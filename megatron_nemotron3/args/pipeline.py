"""Where to cut the pattern for the pipeline: layers weighed by one token's work. Standard library only."""

from __future__ import annotations

from megatron_nemotron3.args.layout import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.flops import layer_flops as layer_cost


def last_stage_cost(config: Nemotron3Config, seq_length: int) -> float:
    """Forward FLOPs for one token of what only the last stage does: output layer, and MTP with its own pass
    through the output layer at every depth. Megatron puts a hybrid's MTP on the last stage, always."""
    output = 2.0 * config.vocab_size * config.hidden_size
    inner = sum(layer_cost(config, kind, seq_length) for kind in config.mtp_pattern or "")
    depth = inner + 2.0 * 2 * config.hidden_size**2 + output  # eh_proj is [d, 2d]
    return output + config.mtp_num_layers * depth


def cut_pattern(config: Nemotron3Config, layout: ParallelLayout, seq_length: int | None = None) -> str:
    """The value of `--hybrid-layer-pattern`: pp * vpp stages of about equal work, then the MTP depths.

    Raises:
        ValueError: fewer layers than stages.
    """
    mtp = (config.mtp_pattern or "",) * config.mtp_num_layers
    if layout.stages == 1:
        return _pattern.join_stages((config.pattern,), mtp)
    tokens = seq_length or config.seq_length
    cost = {kind: layer_cost(config, kind, tokens) for kind in set(config.pattern)}
    stages = _pattern.cut(
        config.pattern, layout.stages, cost, last_stage_extra=last_stage_cost(config, tokens)
    )
    return _pattern.join_stages(stages, mtp)
