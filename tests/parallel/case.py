"""Cases of training: with what no launch of certify has, and with the command line of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self
from unittest import mock

import torch
from torch import Tensor

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule, flags, to_argv
from megatron_nemotron3.proof.certify.case import Batch, TrainingCase, cut, cut_packed
from tests.support.short_run import short_schedule


@dataclass(frozen=True, kw_only=True)
class Scenario(TrainingCase):
    """A training with what no launch of certify has: padded or separate documents, other masks."""

    #: "heads": without the first tokens of every document, as many as there are MTP depths. "random heads":
    #: both. "middle": without all but the first and the last quarter of the sequence, so without all that the
    #: second of two CP ranks holds.
    mask: Literal["none", "random", "heads", "random heads", "middle"] = "random"  # type: ignore[assignment]
    #: What each document is padded to in the pack (`cu_seqlens_q_padded`); the rest of the row is padding.
    padded: tuple[int, ...] | None = None
    #: The mask that the model gets, for MTP: that of the loss, the same with padding counted, or none.
    model_mask: Literal["same", "padding counts", "absent"] = "same"
    #: Every document a micro-batch of its own instead: what packing must be equal to. One rank only.
    separate: bool = False

    @property
    def microbatches(self) -> int:
        documents = sum(length > 0 for length in self.documents or ()) if self.separate else 1
        return documents * super().microbatches

    def counting(self, positions: Tensor, random: Tensor) -> Tensor:
        heads = positions >= (self.config.mtp_num_layers or 0)
        quarter = self.seq_length // 4
        return {
            "none": positions >= 0,
            "random": random,
            "heads": heads,
            "random heads": random & heads,
            "middle": (positions < quarter) | (positions >= self.seq_length - quarter),
        }[self.mask]

    def shares(self, batch: dict[str, Tensor]) -> Iterator[Batch]:
        if self.separate:
            assert self.documents is not None
            lengths = [length for length in self.documents if length]
            parts = zip(*(t.split(lengths, dim=1) for t in batch.values()))
            yield from ((self._masked(dict(zip(batch, part))), None) for part in parts)
            return
        if self.documents is None:
            share, packed = cut(batch)
        else:
            if self.padded is not None and self.padded != self.documents:
                batch = _pad(batch, self.documents, (*self.padded, self.seq_length - sum(self.padded)))
            share, packed = cut_packed(batch, self.documents, self.padded, self.cut_whole)
            self.mark(packed)
        yield self._masked(share), packed

    def _masked(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.model_mask == "absent":
            return batch
        counted = batch.pop("padding", 0) if self.model_mask == "padding counts" else 0
        return {**batch, "model_mask": batch["loss_mask"] + counted}


def _pad(batch: dict[str, Tensor], documents: tuple[int, ...], padded: tuple[int, ...]) -> dict[str, Tensor]:
    """Documents with tokens and labels of 1, which no loss must see, behind each and behind the last."""
    n = next(iter(batch.values())).shape[0]
    real = torch.cat([torch.arange(p) < d for d, p in zip((*documents, 0), padded)])
    result = {"padding": (~real).float().expand(n, -1)}
    for key, t in batch.items():
        result[key] = t.new_full((n, len(real)), 0 if key == "loss_mask" else 1)
        result[key][:, real] = t
    return result


@dataclass(frozen=True, kw_only=True)
class Case(Scenario):
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
