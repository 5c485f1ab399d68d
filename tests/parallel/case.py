"""A case whose command line is that of a launch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule, flags, to_argv
from megatron_nemotron3.proof.certify import case
from tests.support.short_run import short_schedule


@dataclass(frozen=True, kw_only=True)
class Case(case.TrainingCase):
    """A model, how it is spread, and what it is trained on, with the flags of this package."""

    #: Megatron options on top of ours.
    extra: tuple[str, ...] = ()
    precision: str = "fp32"
    #: Switches of ours to leave out.
    without: tuple[str, ...] = ()
    #: Go on although a rule refuses it, to see what comes of it.
    against_rules: bool = False

    def at(self, layout: ParallelLayout, *extra: str, **changes: Any) -> Self:
        """The same training in another layout."""
        return super().at(layout, extra=(*self.extra, *extra), **changes)

    def argv(self) -> list[str]:
        """Megatron's command line."""
        schedule = short_schedule(
            self.steps,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.sequences,
            lr=1e-2,
            min_lr=1e-2,
        )
        rules_off = mock.patch("megatron_nemotron3.launch.flags.rules.enforce")
        with rules_off if self.against_rules else nullcontext():
            words = self._words(schedule)
        return [word for word in words if word not in self.without]

    def _words(self, schedule: TrainingSchedule) -> list[str]:
        return to_argv(
            flags(
                Launch.of(
                    self.config,
                    self.layout,
                    precision=self.precision,
                    backend="torch",
                    schedule=schedule,
                    extra=("--adam-eps", "1e-2", *self.extra),  # as in `case.Case.argv`
                )
            )
        )
