"""STUB."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_nemotron3.args.flag import parse
from megatron_nemotron3.args.layout import ParallelLayout
from megatron_nemotron3.args.schedule import TrainingSchedule
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.versions import DEFAULT


@dataclass(frozen=True, kw_only=True)
class Launch:
    config: Nemotron3Config
    layout: ParallelLayout = ParallelLayout()
    precision: str = "bf16"
    backend: str = "auto"
    schedule: TrainingSchedule | None = None
    extra: tuple[str, ...] = ()
    te_precision_config_file: str | None = None
    compute_capability: tuple[int, int] | None = None
    distributed_optimizer: bool = True
    megatron_core: str = DEFAULT

    @property
    def seq_length(self) -> int:
        return (self.schedule.seq_length if self.schedule else None) or self.config.seq_length

    @cached_property
    def options(self) -> dict[str, tuple[str, ...]]:
        return {flag.name: flag.values for flag in parse(self.extra)}

    @property
    def micro_batch_size(self) -> int:
        return self.schedule.micro_batch_size if self.schedule else 1

    @property
    def microbatches(self) -> int:
        whole = self.schedule.global_batch_size if self.schedule else None
        return max(1, (whole or 1) // self.layout.dp // self.micro_batch_size)
