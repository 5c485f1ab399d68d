"""Launches as the tests of plan write them: microbatches per rank in place of a global batch."""

from __future__ import annotations

from typing import Any

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule
from megatron_nemotron3.launch.plan.activation_forms import RankShare
from megatron_nemotron3.launch.plan.activations import stage_bytes
from megatron_nemotron3.launch.plan.options import NONE, Recompute
from megatron_nemotron3.launch.plan.state import stage_patterns
from megatron_nemotron3.models import LoRASettings, Nemotron3Config

ONE_RANK = ParallelLayout()


def launch(
    config: Nemotron3Config,
    layout: ParallelLayout = ONE_RANK,
    *,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    microbatches: int = 1,
    recompute: Recompute = NONE,
    **fields: Any,
) -> Launch:
    """A launch on the torch backend, unless `fields` say otherwise."""
    schedule = TrainingSchedule(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        global_batch_size=microbatches * micro_batch_size * layout.dp,
    )
    fields = {"backend": "torch", "extra": tuple(recompute.flags()), **fields}
    return Launch(config=config, layout=layout, schedule=schedule, **fields)


def stage_activations(
    launch: Launch, stage: int, *, imbalance: float = 1.0, lora: LoRASettings | None = None
) -> dict[str, int]:
    """Bytes that a stage keeps for one microbatch on one rank, by layer kind."""
    patterns = stage_patterns(launch.config, launch.layout.stages, launch.seq_length)
    return stage_bytes(launch.config, RankShare.of(launch, imbalance, lora), patterns, stage)[0]
