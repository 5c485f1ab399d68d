"""Schedules: the published pre-training, a short one for a CPU, and changes to one. Standard library only.

What follows pre-training, long context and fine-tuning, is in `phases.py`.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_nemotron3.args.training_schedule import SAMPLES, TrainingSchedule
from megatron_nemotron3.models import Nemotron3Config

__all__ = ["TrainingSchedule", "adjusted", "published", "smoke"]

# Public launch scripts. Nano warms up over 8.4B tokens, Super and Ultra over 200B. Ultra's script has Super's
# lengths (25T tokens); the run itself stopped at 20T with an earlier decay whose samples no source states.
_PUBLISHED = {
    "nano": TrainingSchedule(
        global_batch_size=3072,
        train_samples=3_051_757_813,
        lr=1e-3,
        min_lr=1e-5,
        lr_warmup_samples=1_024_000,
        lr_decay_samples=3_050_733_813,
        lr_wsd_decay_samples=610_351_563,
    ),
    "super": TrainingSchedule(
        global_batch_size=3072,
        train_samples=3_051_757_813,
        lr=4.5e-4,
        min_lr=4.5e-6,
        lr_warmup_samples=24_414_063,
        lr_decay_samples=3_048_706_055,
        lr_wsd_decay_samples=610_351_563,
    ),
    "ultra": TrainingSchedule(
        micro_batch_size=2,
        global_batch_size=3072,
        train_samples=3_051_757_813,
        lr=2.5e-4,
        min_lr=2.5e-6,
        lr_warmup_samples=24_414_063,
        lr_decay_samples=3_048_706_055,
        lr_wsd_decay_samples=610_351_563,
    ),
}


def published(config: Nemotron3Config) -> TrainingSchedule:
    """The schedule of the model's public pre-training launch script.

    For a model without one (Lightning, Nano-4B, Nano 9B v2, Nemotron-H, tiny models) length, learning rate
    and batch are UNKNOWN and stay None; `TrainingSchedule.unknown` names them.
    """
    return _PUBLISHED.get(config.name, TrainingSchedule())


def smoke(config: Nemotron3Config, iters: int = 20, global_batch_size: int = 4) -> TrainingSchedule:
    """A few steps for a tiny model on a laptop: whether it trains, not how well.

    Warm-up is a tenth of the steps and the decay the last fifth, so every phase of the schedule is met.
    """
    return TrainingSchedule(
        global_batch_size=global_batch_size,
        seq_length=min(config.seq_length, 256),
        train_iters=iters,
        lr=1e-3,
        min_lr=1e-5,
        lr_warmup_iters=iters // 10,
        lr_decay_iters=iters,
        lr_wsd_decay_iters=max(1, iters // 5),
        eval_interval=max(1, iters // 2),
        eval_iters=1,
        save_interval=iters,
        log_interval=1,
    )


def adjusted(
    schedule: TrainingSchedule,
    *,
    steps: int | None = None,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    lr: float | None = None,
) -> TrainingSchedule:
    """`schedule` with what is given replaced; None leaves it.

    Args:
        steps: iterations. Under WSD warm-up becomes the first tenth and the decay the last fifth; otherwise
            warm-up stays as it is unless it would not end in time, and then becomes the first tenth.
        lr: peak rate; the minimum follows in proportion, a hundredth in the published WSD schedules.
    """
    changes: dict[str, int | float | None] = {
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": global_batch_size,
        "lr": lr,
        "min_lr": _minimum(schedule, lr),
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if steps is not None:
        changes |= _lengths(replace(schedule, **changes), steps)  # type: ignore[arg-type]
    return replace(schedule, **changes)  # type: ignore[arg-type]


def _minimum(schedule: TrainingSchedule, lr: float | None) -> float | None:
    """The minimum rate that goes with a given peak."""
    if lr is None or schedule.lr_decay_style == "constant":
        return None
    if schedule.lr_decay_style == "WSD" or schedule.lr is None or schedule.min_lr is None:
        return lr / 100
    return lr * schedule.min_lr / schedule.lr


def _lengths(schedule: TrainingSchedule, steps: int) -> dict[str, int | float | None]:
    """The fields that say how long `steps` iterations are."""
    if schedule.lr_decay_style == "WSD":
        return dict.fromkeys(SAMPLES) | {
            "train_iters": steps,
            "lr_warmup_iters": steps // 10,
            "lr_decay_iters": steps,
            "lr_wsd_decay_iters": max(1, steps // 5),
        }
    batch, unit = schedule.global_batch_size, schedule.unit
    if unit == "samples" and batch is None:
        return dict.fromkeys(SAMPLES) | {"train_iters": steps}
    train = steps * (batch or 1) if unit == "samples" else steps
    lengths: dict[str, int | float | None] = {f"train_{unit}": train}
    if schedule.length("lr_decay") is not None:
        lengths[f"lr_decay_{unit}"] = train
    if (schedule.length("lr_warmup") or 0) >= train:
        lengths[f"lr_warmup_{unit}"] = train // 10
    return lengths
