"""What is trained, on what, and in which layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

from megatron_nemotron3.args import Launch, ParallelLayout, TrainingSchedule, flags, to_argv
from megatron_nemotron3.models import Nemotron3Config
from tests.support.short_run import short_schedule


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is spread, and what it is trained on."""

    config: Nemotron3Config
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    #: Megatron options on top of ours.
    extra: tuple[str, ...] = ()
    precision: str = "fp32"
    #: Switches of ours to leave out.
    without: tuple[str, ...] = ()
    seq_length: int = 64
    micro_batch_size: int = 1
    sequences: int = 4  # of a global batch
    steps: int = 3
    seed: int = 7
    #: Tokens that do not count. "random": another number in every sequence. "heads": the first ones of every
    #: document, as many as there are MTP depths. "random heads": both. "middle": everything
    #: but the first and the last quarter of the sequence, so all that the second of two CP ranks holds.
    mask: Literal["none", "random", "heads", "random heads", "middle"] = "random"
    #: The model gets labels and returns a loss; without them it returns logits, as in reinforcement learning.
    labels: bool = True
    #: Lengths of the documents packed into each sequence (THD), None for plain sequences.
    documents: tuple[int, ...] | None = None
    #: What each is padded to inside the pack (`cu_seqlens_q_padded`); the rest of the row is padding, too.
    padded: tuple[int, ...] | None = None
    #: The mask that the model gets, for MTP: that of the loss, the same with padding counted, or none.
    model_mask: Literal["same", "padding counts", "absent"] = "same"
    #: Cut a packed sequence over context-parallel ranks as if it were one document
    #: (`--dataloader-inter-document-masking` does).
    cut_whole: bool = False
    #: Every document a micro-batch of its own instead: what packing must be equal to. One rank only.
    separate: bool = False
    #: Adapters on frozen weights, as `LoRA.parse` reads them; None: train the weights.
    lora: str | None = None
    #: Go on although a rule refuses it, to see what comes of it.
    against_rules: bool = False
    #: Importable function called with this rank's chunks before DistributedDataParallel wraps them, to break
    #: something.
    sabotage: Callable[[Sequence[Any]], None] | None = None

    def at(self, layout: ParallelLayout, *extra: str, **changes: Any) -> Case:
        """The same training in another layout."""
        return replace(self, layout=layout, extra=(*self.extra, *extra), **changes)

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
        rules_off = mock.patch("megatron_nemotron3.args.flags.rules.enforce")
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
                    # The step of Adam divides by |gradient| + epsilon. With an epsilon above the gradients it
                    # is nearly linear in them; with 1e-8 rounding noise of a zero gradient moves a weight by
                    # lr.
                    extra=("--adam-eps", "1e-2", *self.extra),
                )
            )
        )
