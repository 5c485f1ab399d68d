"""Batch size, length and learning rate of a run: `TrainingSchedule`.

Fields have the names of Megatron's options; None means that no source states the value, and then no flag is
emitted. Published schedules are in `phases.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megatron_nemotron3.common.parser import option_values
from megatron_nemotron3.models import Nemotron3Config

#: Fields that hold lengths, by unit.
SAMPLES = ("train_samples", "lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples")
ITERS = ("train_iters", "lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters")


@dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """Batch, length, learning rate and intervals. Lengths are all in samples or all in iterations.

    Raises:
        ValueError: lengths in both units, or a size below 1.
    """

    #: Sequences per rank and step; Megatron requires it.
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    #: Tokens per sequence; None: the config's.
    seq_length: int | None = None

    train_samples: int | None = None
    train_iters: int | None = None

    lr: float | None = None
    min_lr: float | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_iters: int | None = None
    #: Where the decay ends, counted from the start.
    lr_decay_samples: int | None = None
    lr_decay_iters: int | None = None
    #: Length of the last phase, the decay of warmup-stable-decay.
    lr_wsd_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_decay_style: str | None = "WSD"
    lr_wsd_decay_style: str = "minus_sqrt"

    # The same in all three reports. Megatron's defaults differ: weight decay 0.01, beta2 0.999.
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0

    # In iterations; no report states them. The values of NVIDIA's release test of Super
    # (tests/functional_tests/test_cases/nemotron/nemotron3_super_release_gb200).
    eval_interval: int | None = 100
    eval_iters: int = 14
    save_interval: int = 200
    log_interval: int = 10

    def __post_init__(self) -> None:
        samples = [name for name in SAMPLES if getattr(self, name) is not None]
        iters = [name for name in ITERS if getattr(self, name) is not None]
        if samples and iters:
            raise ValueError(
                f"{samples[0]}={getattr(self, samples[0])} and {iters[0]}={getattr(self, iters[0])} use two "
                "units: give all lengths in samples or all in iterations, as Megatron requires"
            )
        # A warm-up may be 0 long, and eval_iters=0 turns evaluation off.
        may_be_zero = {"eval_iters", "lr_warmup_samples", "lr_warmup_iters"}
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in may_be_zero else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{field.name}={value}: give {least} or more")

    @property
    def unit(self) -> str:
        """Unit of the lengths: "iters" or "samples"."""
        return "iters" if any(getattr(self, name) is not None for name in ITERS) else "samples"

    def length(self, name: str) -> int | None:
        """A length by its name without the unit: `length("lr_warmup")`, in `unit`."""
        value: int | None = getattr(self, f"{name}_{self.unit}")
        return value

    @property
    def unknown(self) -> tuple[str, ...]:
        """Fields that training needs and no source states: `("lr", ...)`."""
        needed = {"train": self.length("train"), "lr": self.lr, "lr_decay_style": self.lr_decay_style}
        if self.lr_decay_style not in (None, "constant"):  # a constant rate has no minimum
            needed["min_lr"] = self.min_lr
        return tuple(name for name, value in needed.items() if value is None)


def smoke(config: Nemotron3Config, iters: int = 20, global_batch_size: int = 4) -> TrainingSchedule:
    """Return a schedule of a few steps, which shows whether a tiny model trains on a laptop.

    Warm-up is a tenth of the steps and the decay the last fifth, so the run goes through every phase.
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
    """Replace parts of a schedule; None keeps a part.

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
        "min_lr": _minimum_rate(schedule, lr),
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if steps is not None:
        changes |= _lengths_of(replace(schedule, **changes), steps)  # type: ignore[arg-type]
    return replace(schedule, **changes)  # type: ignore[arg-type]


def missing_schedule(argv: Sequence[str]) -> list[str]:
    """Return the options without which no training starts, of those that a command line does not have."""
    needed = (("--lr",), ("--train-iters", "--train-samples"))
    return [names[0] for names in needed if not any(option_values(argv, name) for name in names)]


#: Scripts that train, unless one of these options is given.
_TRAINING = ("pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_script.py")
_NO_TRAINING = ("--skip-train", "--freeze-all-layers")


def require_schedule(script: str, argv: Sequence[str]) -> None:
    """Raise ValueError at a training without micro-batch size, rate or length; Megatron says less of it."""
    name = os.path.basename(script)
    if name not in _TRAINING or not option_values(argv, "--hybrid-layer-pattern"):
        return
    missing = [] if option_values(argv, "--micro-batch-size") else ["--micro-batch-size"]
    missing += missing_schedule(argv) if set(argv).isdisjoint(_NO_TRAINING) else []
    if missing:
        raise ValueError(
            f"{name} needs {' and '.join(missing)}: give {'them' if missing[1:] else 'it'}, or take the "
            "options of nemotron3 flags NAME --schedule published"
        )


def _minimum_rate(schedule: TrainingSchedule, lr: float | None) -> float | None:
    if lr is None or schedule.lr_decay_style == "constant":
        return None
    if schedule.lr_decay_style == "WSD" or schedule.lr is None or schedule.min_lr is None:
        return lr / 100
    return lr * schedule.min_lr / schedule.lr


def _lengths_of(schedule: TrainingSchedule, steps: int) -> dict[str, int | float | None]:
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


STEPWISE = "--step-batch-size-schedule"


@dataclass(frozen=True)
class BatchSizes:
    """Global batch of each step, as Megatron's calculator of micro-batches has it."""

    #: (samples before it, size); the first begins at 0.
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, schedule: str, length: int) -> BatchSizes:
        """Read --step-batch-size-schedule, whose thresholds are tokens in rows of `length`.

        Raises:
            ValueError: Megatron would refuse it.
        """
        found = []
        for entry in schedule.replace(",", " ").split():
            try:
                tokens, size = map(_count, entry.split(":", 1))
            except (ValueError, OverflowError):
                size = 0
            if size <= 0:
                raise ValueError(f"{STEPWISE} {schedule}: {entry}: give TOKENS:BATCH, as in 0:768 250B:1536")
            found.append((tokens // length, size))
        starts = sorted(start for start, _ in found)
        if not starts or starts[0] != 0 or len(set(starts)) < len(starts):
            raise ValueError(f"{STEPWISE} {schedule}: begin at 0, and let thresholds be a row apart")
        return cls(tuple(sorted(found)))

    @property
    def largest(self) -> int:
        return max(size for _, size in self.sizes)

    def taken(self, steps: float = math.inf, samples: float = math.inf) -> tuple[int, int]:
        """Steps and samples of a run that ends after `steps`, or with the step that reaches `samples`."""
        done, taken = 0, 0
        ends = [*(start for start, _ in self.sizes[1:]), math.inf]
        for (_, size), end in zip(self.sizes, ends, strict=True):
            left = min(end, samples) - taken
            whole = steps - done if left == math.inf else min(steps - done, max(0, -(-left // size)))
            done, taken = done + int(whole), taken + int(whole) * size
        return done, taken


def _count(text: str) -> int:
    """A number with K, M, B or T behind it."""
    powers = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    text = text.strip().upper()
    return int(float(text[:-1]) * powers[text[-1]]) if text[-1:] in powers else int(float(text))
