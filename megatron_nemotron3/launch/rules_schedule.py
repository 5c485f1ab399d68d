"""Rules on batch size, training length, learning rate, and what a resumed run draws."""

from __future__ import annotations

from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.rule import ARGUMENTS, Rule
from megatron_nemotron3.launch.schedule import TrainingSchedule

_SCHEDULER = "megatron/core/optimizer_param_scheduler.py"
#: Options that draw random numbers in a forward pass unless their value is 0.
_DRAWING = (
    "--attention-dropout",
    "--hidden-dropout",
    "--moe-input-jitter-eps",
    "--moe-router-force-biased",
    "--moe-router-force-load-balancing",
)


def _schedule(c: Launch) -> TrainingSchedule:
    assert c.schedule is not None
    return c.schedule


def _rate_of_wsd(c: Launch) -> str | None:
    """The learning rate if it follows WSD; a schedule without a rate emits no style."""
    scheduled = c.schedule if c.schedule and c.schedule.lr is not None else None
    style = c.option("--lr-decay-style", (scheduled and scheduled.lr_decay_style) or "")
    return (c.option("--lr", str(scheduled.lr) if scheduled else "") or None) if style == "WSD" else None


def _replicas(c: Launch) -> int:
    """Sequences of one microbatch on all data-parallel ranks."""
    return _schedule(c).micro_batch_size * c.layout.dp


def _has_batch(c: Launch) -> bool:
    return c.schedule is not None and c.schedule.global_batch_size is not None


def _batch(c: Launch) -> int:
    return _schedule(c).global_batch_size or 0


def _vpp_group(c: Launch) -> int:
    """Return the number of consecutive microbatches of a virtual stage."""
    return int(c.option("--microbatch-group-size-per-virtual-pipeline-stage", str(c.layout.pp)))


def _groups_close(c: Launch) -> bool:
    """Whether every group of microbatches has at least PP."""
    microbatches, group = _batch(c) // _replicas(c), _vpp_group(c)
    rest = microbatches % group
    return c.layout.pp <= group <= microbatches and (rest == 0 or rest >= c.layout.pp)


def _decay_end(c: Launch) -> int | None:
    if c.schedule is None:
        return None
    return c.schedule.length("lr_decay") or c.schedule.length("train")


def _warmup(c: Launch) -> int:
    return _schedule(c).length("lr_warmup") or 0


#: Option in `extra` -> the field of the schedule that it supplies.
_SUPPLIES = {"--train-iters": "train", "--train-samples": "train", "--lr": "lr", "--min-lr": "min_lr"}


def _unknown(c: Launch) -> list[str]:
    given = {_SUPPLIES[name] for name in c.options if name in _SUPPLIES}
    return [name for name in _schedule(c).unknown if name not in given]


def _drawing(c: Launch) -> str:
    """Return the first option that draws random numbers in a forward pass, or ""."""
    names = (name for name in _DRAWING if name in c.options)
    return next((name for name in names if c.options[name] not in (("0",), ("0.0",))), "")


SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule(
        "global-batch",
        lambda c: _has_batch(c) and _batch(c) % _replicas(c),
        lambda c: (
            f"global_batch_size={_batch(c)} is not divisible by micro_batch_size*DP={_replicas(c)}: "
            f"use a multiple of {_replicas(c)} or another DP"
        ),
        ARGUMENTS,
    ),
    Rule(
        "vpp-microbatches",
        lambda c: _has_batch(c) and c.layout.vpp > 1 and not _groups_close(c),
        lambda c: (
            f"VPP={c.layout.vpp} runs microbatches in groups of {_vpp_group(c)}, each of at least "
            f"PP={c.layout.pp} microbatches, but a step has {_batch(c) // _replicas(c)}: use groups "
            f"of {c.layout.pp} and a global_batch_size that is a multiple of {c.layout.pp * _replicas(c)}"
        ),
        "megatron/core/pipeline_parallel/schedules.py",
    ),
    Rule(
        "learning-rate-order",
        lambda c: (
            c.schedule is not None
            and c.schedule.lr is not None
            and c.schedule.min_lr is not None
            and c.schedule.min_lr > c.schedule.lr
        ),
        lambda c: f"min_lr={_schedule(c).min_lr} exceeds lr={_schedule(c).lr}: swap them",
        _SCHEDULER,
    ),
    Rule(
        "warmup-length",
        lambda c: (end := _decay_end(c)) is not None and _warmup(c) >= end,
        lambda c: (
            f"lr_warmup_{_schedule(c).unit}={_warmup(c)} is not below {_decay_end(c)}, where the decay ends: "
            "shorten the warm-up"
        ),
        _SCHEDULER,
    ),
    Rule(
        "wsd-decay-length",
        lambda c: (
            _rate_of_wsd(c) is not None
            and (c.schedule is None or c.schedule.length("lr_wsd_decay") is None)
            and c.first_of("--lr-wsd-decay-samples", "--lr-wsd-decay-iters") is None
        ),
        lambda c: (
            f"lr_decay_style=WSD with lr={_rate_of_wsd(c)} needs the length of the decay phase: set "
            "lr_wsd_decay_"
            + ("iters" if "--train-iters" in c.options else c.schedule.unit if c.schedule else "samples")
        ),
        _SCHEDULER,
    ),
    Rule(
        "schedule-unknown",
        lambda c: c.schedule is not None and _unknown(c),
        lambda c: (
            f"{c.config.name}: the schedule has no {', '.join(_unknown(c))}, so no such option is emitted: "
            "take --schedule published where it has them, or append Megatron's options"
        ),
        "schedule.published",
        "warning",
    ),
    Rule(
        "moe-router-force-biased",
        lambda c: c.option("--moe-router-force-biased", "").startswith("-"),
        lambda c: (
            "--moe-router-force-biased: below 0 each process draws a bias when it starts and keeps it, so a "
            "resumed run has another; give a positive deviation, which draws one in each forward"
        ),
        "megatron/core/transformer/moe/moe_utils.py",
    ),
    Rule(
        "cuda-graph-draws",
        lambda c: c.option("--cuda-graph-impl", "none") == "full_iteration" and _drawing(c),
        lambda c: (
            f"{_drawing(c)} in a graph of the whole iteration draws from states of which a checkpoint has "
            "those of one replica, so a resumed run draws other numbers: use --cuda-graph-impl local or "
            f"transformer_engine, or leave {_drawing(c)} out"
        ),
        "Megatron-LM #6858",
    ),
)
