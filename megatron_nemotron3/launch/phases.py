"""The published phases after pre-training, and the end of pre-training in BF16.

Schedules are those of the technical reports: Nano arXiv 2512.20848 (2.5, 3.1.6), Super
2604.12374 (2.6, 3.1), Ultra 2606.15007 (2.5, 3.1). A field or layout that is None is UNKNOWN: no source
states it. docs/launching.md says which of them stock Megatron-LM can run.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_nemotron3.launch.layout import ParallelLayout, published_layout
from megatron_nemotron3.launch.schedule import TrainingSchedule, published
from megatron_nemotron3.models import Nemotron3Config

#: In the order of training. "published" is pre-training. A model has the phases its report names.
PHASES = ("published", "long-context", "long-context-2", "long-context-4k", "sft", "sft-2")
#: The last part of a pre-training run that was quantized before: the same schedule, in BF16.
BF16_END = "bf16-end"
#: Where "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149, appendix D) switched: at 8.2T of
#: 10T tokens. With the forward pass in BF16 from there on, the loss of its 12B model was 0.5 % above that of
#: FP8 instead of 1.5 %; switching backward alone gained nothing.
BF16_END_START = 0.82

_1M, _512K, _256K, _4K = 1 << 20, 1 << 19, 1 << 18, 1 << 12


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


def _constant(lr: float, seq_length: int, batch: int | None, iters: int | None) -> TrainingSchedule:
    return TrainingSchedule(
        seq_length=seq_length, global_batch_size=batch, train_iters=iters, lr=lr, lr_decay_style="constant"
    )


_PUBLISHED: dict[str, dict[str, Phase]] = {
    "nano": {
        "long-context": Phase(
            schedule=_constant(1e-5, _512K, 48, None),
            layout=ParallelLayout(tp=8, pp=4, cp=8, ep=8),  # on H100
            note="121e9 tokens at 512K and 4K together, 4808 steps if all were at 512K",
        ),
        "long-context-4k": Phase(
            schedule=_constant(1e-5, _4K, None, None),
            note="121e9 tokens at 512K and 4K together",
        ),
        "sft": Phase(
            schedule=TrainingSchedule(
                seq_length=_256K,
                global_batch_size=64,
                train_iters=13_000,
                lr=5e-5,
                lr_warmup_iters=800,
                lr_decay_style=None,
            ),
            sft=True,
            note="the report mentions no decay; Super's rate is constant, Ultra's follows a cosine",
        ),
    },
    "super": {
        "long-context": Phase(  # 34e9 tokens
            schedule=_constant(4.5e-6, _1M, 16, 2027),
            layout=ParallelLayout(tp=2, cp=64, ep=64),  # on GB200
        ),
        "long-context-2": Phase(
            schedule=_constant(4.5e-6, _1M, 16, None),
            layout=ParallelLayout(tp=2, cp=64, ep=64),
            note="17e9 tokens alternating between 1M and 4K, 1013 steps if all were at 1M",
        ),
        "long-context-4k": Phase(
            schedule=_constant(4.5e-6, _4K, None, None),
            note="17e9 tokens alternating between 1M and 4K",
        ),
        "sft": Phase(
            schedule=TrainingSchedule(
                seq_length=_256K,
                global_batch_size=64,
                lr=1e-5,
                lr_warmup_samples=30_000,
                lr_decay_style="constant",
            ),
            sft=True,
            note="over 7 million conversations, about 80e9 tokens, in both stages together",
        ),
        "sft-2": Phase(
            schedule=_constant(1e-5, _512K, 32, None),
            sft=True,
            note="over 7 million conversations, about 80e9 tokens, in both stages together",
        ),
    },
    # Every step has 25,165,824 tokens of one length; 33e9 tokens, 92 % of the steps at 1M.
    "ultra": {
        "long-context": Phase(
            schedule=_constant(2.5e-6, _1M, 24, 1206),
            layout=ParallelLayout(tp=8, pp=2, cp=32, ep=128),  # on GB200
        ),
        "long-context-4k": Phase(schedule=_constant(2.5e-6, _4K, 6144, 105)),
        "sft": Phase(
            schedule=TrainingSchedule(
                seq_length=294_912,
                global_batch_size=64,
                train_samples=204_800,
                lr=1.5e-5,
                min_lr=1e-6,
                lr_warmup_samples=9_600,
                lr_decay_samples=204_800,
                lr_decay_style="cosine",
            ),
            sft=True,
        ),
        "sft-2": Phase(
            schedule=TrainingSchedule(
                seq_length=515_000,
                global_batch_size=64,
                train_samples=19_200,
                lr=1e-5,
                min_lr=2e-6,
                lr_warmup_samples=6_400,
                lr_decay_samples=19_200,
                lr_decay_style="cosine",
            ),
            sft=True,
        ),
    },
}

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
    if name in ("published", BF16_END):
        precision = "bf16" if name == BF16_END else None
        return Phase(schedule=published(config), layout=published_layout(config), precision=precision)
    phases = _PUBLISHED.get(config.name, {})
    if name not in phases:
        raise ValueError(
            f"{config.name} has no published phase {name}: use {', '.join(['published', *phases])}"
        )
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
