"""The published phases of training, `published.json`, and the end of pre-training in BF16.

Pre-training is that of the public launch scripts. The schedules of the phases after it are those of the
technical reports: Nano arXiv 2512.20848 (2.5, 3.1.6), Super 2604.12374 (2.6, 3.1), Ultra 2606.15007 (2.5,
3.1). A field or layout that is None is UNKNOWN: no source states it. docs/launching.md says which of them
stock Megatron-LM can run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.launch.schedule import TrainingSchedule
from megatron_nemotron3.models import Nemotron3Config

#: In the order of training. "published" is pre-training. A model has the phases its report names.
PHASES = ("published", "long-context", "long-context-2", "long-context-4k", "sft", "sft-2")
#: The last part of a pre-training run that was quantized before: the same schedule, in BF16.
BF16_END = "bf16-end"
#: Where "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149, appendix D) switched: at 8.2T of
#: 10T tokens. With the forward pass in BF16 from there on, the loss of its 12B model was 0.5 % above that of
#: FP8 instead of 1.5 %; switching backward alone gained nothing.
BF16_END_START = 0.82


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A published phase of training: one run with one sequence length."""

    schedule: TrainingSchedule
    #: The one with the fewest ranks; None: UNKNOWN.
    layout: ParallelLayout | None = None
    #: Conversations instead of text.
    sft: bool = False
    #: What sources say about the fields that the schedule leaves open.
    note: str = ""
    #: The precision it is in; None: any.
    precision: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Megatron options that are not part of a schedule, for `Launch.extra`."""
        # The published SFT loss is the mean over all unmasked tokens of the global batch.
        return ("--sft", "--calculate-per-token-loss") if self.sft else ()


#: Model -> what is published: "launch", its public launch script (`reference.PublicLaunch`), and "phases".
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)


def _phase(row: Mapping[str, Any]) -> Phase:
    found = {name: value for name, value in row.items() if name != "about"}
    found["schedule"] = TrainingSchedule(**row["schedule"])
    found["layout"] = ParallelLayout(**row["layout"]) if "layout" in row else None
    return Phase(**found)


_PHASES = {
    model: {name: _phase(row) for name, row in found["phases"].items()} for model, found in PUBLISHED.items()
}


def published(config: Nemotron3Config) -> TrainingSchedule:
    """Return the schedule of the model's public pre-training launch script.

    For a model without one (Lightning, Nano-4B, Nano 9B v2, Nemotron-H, tiny models) length, learning rate
    and batch are UNKNOWN and stay None; `TrainingSchedule.unknown` names them.
    """
    return phase(config, "published").schedule


def published_layout(config: Nemotron3Config) -> ParallelLayout | None:
    """Return the layout of the model's public pre-training launch script; None if there is none."""
    return phase(config, "published").layout


#: Field of the schedule -> the option of `nemotron3 flags` that gives it, and the variable of a recipe.
_GIVE = {
    "train": "--steps (recipe: STEPS)",
    "global_batch_size": "--global-batch-size (recipe: GBS)",
    "lr_decay_style": "--lr-decay-style after a lone -- (recipe: LR_DECAY_STYLE)",
}


def switch_step(schedule: TrainingSchedule) -> int:
    """The step after which the rest of a run is in BF16."""
    length, batch = schedule.length("train"), schedule.global_batch_size
    if length is None or (schedule.unit == "samples" and batch is None):
        raise ValueError(f"{BF16_END} is the last part of a run of known length: give {_GIVE['train']}")
    steps = length if schedule.unit == "iters" else -(-length // (batch or 1))
    step = round(BF16_END_START * steps)
    if not 0 < step < steps:
        raise ValueError(f"a run of {steps} steps has no last part of its own: give --steps 2 or more")
    return step


def phase(config: Nemotron3Config, name: str) -> Phase:
    """Return a published phase by its name, one of `PHASES`, or `BF16_END`."""
    phases = {"published": Phase(schedule=TrainingSchedule()), **_PHASES.get(config.name, {})}
    if name == BF16_END:
        return replace(phases["published"], precision="bf16")
    if name not in phases:
        raise ValueError(f"{config.name} has no published phase {name}: use {', '.join(phases)}")
    return phases[name]


def require_known(
    config: Nemotron3Config, name: str, schedule: TrainingSchedule, options: tuple[str, ...] = ()
) -> None:
    """Raise if a value that training needs is UNKNOWN for a phase after pre-training."""
    missing = [field for field in schedule.unknown if field in _GIVE]
    if schedule.global_batch_size is None:
        missing.append("global_batch_size")
    missing = [m for m in missing if f"--{m.replace('_', '-')}" not in options]
    if missing:
        note = phase(config, name).note
        raise ValueError(
            f"{config.name} {name}: no source states {', '.join(missing)}"
            + (f" ({note})" if note else "")
            + f": give {', '.join(_GIVE[m] for m in missing)}"
        )
