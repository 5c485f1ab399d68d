"""The learning rate and the layout of a run that goes on from a checkpoint.

Megatron's scheduler counts samples, also if the lengths of the command line are iterations. A checkpoint
holds its lengths and rates, and a command line with others ends in an AssertionError, unless
`--override-opt-param-scheduler` takes those of the command line, or `--use-checkpoint-opt-param-scheduler`
those of the checkpoint. Neither plans for more steps: with the first the rate jumps to what the new schedule
has at that step, with the second it stays at the minimum. `continued` plans the remaining steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_nemotron3.checkpoints.state import StoredState, loaded_state
from megatron_nemotron3.common.parser import option_value
from megatron_nemotron3.launch.flag import from_first_option, parse, text

OVERRIDE, KEEP = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"
#: Options that describe the schedule: with one of them it is the user's.
OPTIONS = frozenset(
    (
        *(
            f"--lr-{part}-{unit}"
            for part in ("warmup", "decay", "wsd-decay")
            for unit in ("iters", "samples")
        ),
        *("--lr-warmup-fraction", "--lr-warmup-init", "--lr-decay-style", "--lr-wsd-decay-style"),
        *("--train-iters", "--train-samples", "--start-weight-decay", "--end-weight-decay"),
        *("--weight-decay", "--weight-decay-incr-style", OVERRIDE),
    )
)
#: Options with which a checkpoint's scheduler is not loaded, or the batch grows.
_OTHER = ("--finetune", "--no-load-optim", "--rampup-batch-size", "--step-batch-size-schedule")
#: Size, its option, and the size that it is by default ("": 1).
_MODEL_PARALLEL = (
    ("TP", "tensor-model-parallel-size", ""),
    ("PP", "pipeline-model-parallel-size", ""),
    ("EP", "expert-model-parallel-size", ""),
    ("ETP", "expert-tensor-parallel-size", "TP"),
)
#: States of the distributed optimizer that are stored by rank, without the names of parameters.
_BY_RANK = ("dp_reshardable", "dp_zero_gather_scatter")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rates as Megatron's OptimizerParamScheduler has them, and the length of the run."""

    #: "iters" or "samples".
    unit: str
    #: Length of the run in `unit`.
    train: int
    batch: int
    lr: float
    min_lr: float
    #: Rate at which the warm-up starts.
    init: float = 0.0
    #: In samples, as everything below.
    warmup: float = 0
    decay_end: float
    #: Length of the last phase of WSD.
    wsd_decay: float | None = None
    style: str = "linear"
    wsd_style: str = "exponential"

    @property
    def per_unit(self) -> int:
        return self.batch if self.unit == "iters" else 1

    def rate(self, samples: float) -> float:
        """Learning rate after that many samples; the source is Megatron's `get_lr`."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.init + (self.lr - self.init) * samples / self.warmup
        if self.style == "constant":
            return self.lr
        if samples > self.decay_end:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1) / max(samples, 1)))
        ratio = (samples - self.warmup) / (self.decay_end - self.warmup)
        style = self.style
        if style == "WSD":
            length = self.wsd_decay or 1
            if samples <= self.decay_end - length:
                return self.lr
            ratio, style = (samples - self.decay_end + length) / length, self.wsd_style
        part = {
            "linear": 1 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1),
            "exponential": 2 * 0.5**ratio - 1,
            "minus_sqrt": 1 - math.sqrt(ratio),
        }[style]
        return self.min_lr + part * (self.lr - self.min_lr)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The schedule of a checkpoint, and how far it is."""

    schedule: Schedule
    step: int
    #: Samples that the scheduler has counted.
    clock: int
    #: Samples of the data set.
    consumed: int
    #: What Megatron compares: name in the checkpoint -> value.
    state: Mapping[str, Any]


def saved_schedule(step: int, scheduler: Mapping[str, Any], args: Mapping[str, Any]) -> Saved | None:
    """Return the schedule that a checkpoint holds; None if it is not one that this module knows."""
    unit = "iters" if args.get("train_iters") and not args.get("train_samples") else "samples"
    batch = args.get("global_batch_size")
    wsd = args.get(f"lr_wsd_decay_{unit}")
    try:
        schedule = Schedule(
            unit=unit,
            train=int(args[f"train_{unit}"]),
            batch=int(batch),  # type: ignore[arg-type]
            lr=float(scheduler["max_lr"]),
            min_lr=float(scheduler["min_lr"]),
            init=float(args.get("lr_warmup_init") or 0.0),
            warmup=scheduler["lr_warmup_steps"] + 0,
            decay_end=scheduler["lr_decay_steps"] + 0,
            wsd_decay=None if wsd is None else wsd * (batch if unit == "iters" else 1),
            style=str(scheduler["lr_decay_style"]),
            wsd_style=str(args.get("lr_wsd_decay_style") or "exponential"),
        )
        clock = int(scheduler["num_steps"])
        consumed = int(args.get("consumed_train_samples") or clock)
    except (KeyError, TypeError, ValueError):
        return None
    return Saved(schedule=schedule, step=step, clock=clock, consumed=consumed, state=dict(scheduler))


def schedule_of_arguments(words: Sequence[str]) -> Schedule | None:
    """Return the schedule that a Megatron command line describes; None if it leaves something open."""
    given = {flag.name: flag.values for flag in parse(from_first_option(words))}

    def number(name: str) -> float | None:
        try:
            value = float(given[name][0])
        except (KeyError, IndexError, ValueError):
            return None
        return value if math.isfinite(value) else None

    unit = "iters" if "--train-iters" in given else "samples"
    train, batch, lr = number(f"--train-{unit}"), number("--global-batch-size"), number("--lr")
    if not train or not batch or lr is None or any(name in given for name in _OTHER):
        return None
    per_unit = batch if unit == "iters" else 1
    end, wsd = number(f"--lr-decay-{unit}"), number(f"--lr-wsd-decay-{unit}")
    decay_end = per_unit * (train if end is None else end)
    fraction = number("--lr-warmup-fraction")
    warmup = per_unit * (number(f"--lr-warmup-{unit}") or 0)
    return Schedule(
        unit=unit,
        train=int(train),
        batch=int(batch),
        lr=lr,
        min_lr=number("--min-lr") or 0.0,
        init=number("--lr-warmup-init") or 0.0,
        warmup=warmup if fraction is None else fraction * decay_end,
        decay_end=decay_end,
        wsd_decay=None if wsd is None else per_unit * wsd,
        style=(given.get("--lr-decay-style") or ("linear",))[0],
        wsd_style=(given.get("--lr-wsd-decay-style") or ("exponential",))[0],
    )


def differences(saved: Saved, wanted: Schedule) -> dict[str, tuple[Any, Any]]:
    """Return what Megatron would refuse to load: name in the checkpoint -> (its value, the new one)."""
    new = {
        "max_lr": wanted.lr,
        "min_lr": wanted.min_lr,
        "lr_warmup_steps": wanted.warmup,
        "lr_decay_steps": wanted.decay_end,
        "lr_decay_style": wanted.style,
        "wd_incr_steps": wanted.train * wanted.per_unit,
    }
    pairs = {name: (saved.state[name], value) for name, value in new.items() if name in saved.state}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def described(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return `differences` as text."""
    return ", ".join(
        f"{name} {old} -> {new:g}" if isinstance(new, float) else f"{name} {old} -> {new}"
        for name, (old, new) in changed.items()
    )


def refused(words: Sequence[str]) -> str | None:
    """Return why Megatron would not load optimizer or schedule of the checkpoint that its command line names.

    The message names the option that it needs. None: it would load them, or nothing is known.
    """
    wanted, found = schedule_of_arguments(words), loaded_state(words)
    if found is None:
        return None
    step, state = found
    saved = saved_schedule(step, state.scheduler, state.args)
    try:
        require_loadable_layout(step, state, words)
        if wanted is None or saved is None:
            return None
        require_same_rates(saved, wanted)
    except ValueError as problem:
        return str(problem)
    changed, decay = differences(saved, wanted), saved.schedule.wsd_decay
    if KEEP in words and saved.schedule.style == "WSD" and decay not in (None, wanted.wsd_decay):
        return (
            f"{KEEP} keeps the checkpoint's schedule, but Megatron's scheduler does not hold the length of "
            f"the WSD decay: give --lr-wsd-decay-{wanted.unit} {(decay or 0) / wanted.per_unit:g}"
        )
    if not changed or OVERRIDE in words or KEEP in words:
        return None
    return (
        f"the checkpoint of step {saved.step} has another schedule, in samples: {described(changed)}; "
        f"Megatron needs {OVERRIDE} to take the new one, or {KEEP} to keep the checkpoint's"
    )


def require_loadable_layout(step: int, state: StoredState, words: Sequence[str]) -> None:
    """Raise a ValueError if the optimizer's state cannot be loaded in the layout of a command line.

    At another TP or PP Megatron's `load_checkpoint` raises, at another EP or ETP the state has other keys.
    """
    if (
        state.sharding not in _BY_RANK
        or state.args.get("no_save_optim")
        or "--use-distributed-optimizer" not in words
        or any(option in words for option in ("--finetune", "--no-load-optim"))
    ):
        return
    before, now, changed = {"": "1"}, {"": "1"}, []
    for name, option, default in _MODEL_PARALLEL:
        stored, given = state.args.get(option.replace("-", "_")), option_value(words, f"--{option}")
        before[name], now[name] = str(stored or before[default]), given or now[default]
        # Without experts their sizes mean nothing.
        counts = "expert" not in option or bool(state.args.get("num_experts"))
        changed += [name] * (counts and before[name] != now[name])
    if not changed:
        return
    old, new = (" ".join(f"{name}={each[name]}" for name in changed) for each in (before, now))
    raise ValueError(
        f"step {step} was saved at {old}, with an optimizer state that loads only there, not at {new}: "
        f"resume at {old}, or give --no-load-optim to start the optimizer anew; a run that is saved with "
        "--dist-ckpt-optim-fully-reshardable can change its layout"
    )


def require_same_rates(saved: Saved, wanted: Schedule) -> None:
    """Raise a ValueError if peak or minimum rate differ.

    Megatron finds an optimizer's parameter groups by their rates, also with --override-opt-param-scheduler,
    and ends in a KeyError.
    """
    old = saved.schedule
    if (old.lr, old.min_lr) != (wanted.lr, wanted.min_lr):
        raise ValueError(
            f"step {saved.step} was trained with --lr {old.lr:g} --min-lr {old.min_lr:g}; Megatron cannot "
            f"load its optimizer with --lr {wanted.lr:g} --min-lr {wanted.min_lr:g}: give the rates of the "
            "checkpoint, or --no-load-optim to start the optimizer anew"
        )


def continued(saved: Saved, wanted: Schedule, *, keep: bool = False) -> tuple[list[str], list[str]]:
    """Return Megatron's options with which a run goes on, and lines to print.

    A run of the same length keeps the checkpoint's schedule. For another length the remaining steps are
    planned anew. The rate goes on from where it is: a warm-up that has begun is finished, and a rate below
    the peak rises to it over a tenth of the remaining steps.
    """
    require_same_rates(saved, wanted)
    old = saved.schedule
    if old.unit != wanted.unit:
        raise ValueError(
            f"the checkpoint of step {saved.step} was trained with --train-{old.unit}: give the length with "
            f"--train-{old.unit}, not with --train-{wanted.unit}"
        )
    shape = (old.train, old.batch, old.style, old.wsd_style)
    fields = ("init", "warmup", "decay_end", "wsd_decay", "style", "wsd_style")
    kept = replace(wanted, **{name: getattr(old, name) for name in fields})
    if shape == (wanted.train, wanted.batch, wanted.style, wanted.wsd_style):
        return _words(saved, kept), []
    left = wanted.train - (saved.step if wanted.unit == "iters" else saved.consumed)
    if keep or left * wanted.per_unit < 2 * wanted.batch:
        return _words(saved, kept), [f"the checkpoint's schedule is kept: {_described(saved, kept)}"]
    plan = _planned(saved, wanted, left)
    line = f"schedule planned anew from step {saved.step}: {_described(saved, plan)}"
    return _words(saved, plan), [f"{line} (-- {KEEP} keeps the old one)"]


def _described(saved: Saved, plan: Schedule) -> str:
    def step(samples: float) -> str:
        return f"{saved.step + (samples - saved.clock) / plan.batch:.10g}"

    parts = [f"learning rate {plan.rate(saved.clock):g}"]
    if saved.clock < plan.warmup and plan.rate(saved.clock) != plan.lr:
        parts.append(f"up to {plan.lr:g} at step {step(plan.warmup)}")
    if plan.style not in ("constant", "inverse-square-root") and saved.clock < plan.decay_end:
        begin = plan.decay_end - (plan.wsd_decay or 0) if plan.style == "WSD" else plan.warmup
        since = f"from step {step(begin)} " if begin > saved.clock else ""
        parts.append(f"{since}down to {plan.min_lr:g} at step {step(plan.decay_end)}")
    return ", ".join(parts)


def _planned(saved: Saved, wanted: Schedule, left: int) -> Schedule:
    """Plan the `left` iterations or samples that remain."""
    old, per_unit = saved.schedule, wanted.per_unit
    least = wanted.batch // per_unit  # one step
    now, clock = old.rate(saved.clock), saved.clock // per_unit
    end = clock + left
    decay = max(least, left // 5)
    warmup, init = math.ceil(old.warmup / per_unit), old.init
    if wanted.style in ("constant", "inverse-square-root"):
        end = max(end, warmup + least)
    elif warmup >= end or (saved.clock > old.warmup and now < old.lr):
        warmup = clock + max(least, left // 10)
    if warmup * per_unit != old.warmup and warmup * per_unit > saved.clock:
        # A line through the present rate, extended to 0 samples, where Megatron lets a warm-up start.
        span = warmup * per_unit
        init = min(old.lr, (now * span - old.lr * saved.clock) / (span - saved.clock))
    return replace(
        wanted,
        init=init,
        warmup=warmup * per_unit,
        decay_end=end * per_unit,
        wsd_decay=min(decay, end - warmup) * per_unit if wanted.style == "WSD" else None,
    )


def _words(saved: Saved, plan: Schedule) -> list[str]:
    per_unit = plan.per_unit
    warmup, decay = math.ceil(plan.warmup / per_unit), math.ceil(plan.decay_end / per_unit)
    words = [f"--lr-warmup-{plan.unit}", str(warmup), f"--lr-decay-{plan.unit}", str(decay)]
    if plan.wsd_decay is not None:
        words += [f"--lr-wsd-decay-{plan.unit}", str(math.ceil(plan.wsd_decay / per_unit))]
    words += ["--lr-decay-style", plan.style]
    words += ["--lr-wsd-decay-style", plan.wsd_style] if plan.style == "WSD" else []
    if plan.init:  # argparse takes -0.04 for a number, but -4e-2 for an option
        words += ["--lr-warmup-init", f"{plan.init:.20f}" if plan.init < 0 else text(plan.init)]
    # Megatron compares samples, of which an iteration of another batch has another number.
    read = replace(plan, warmup=warmup * per_unit, decay_end=decay * per_unit)
    return [*words, OVERRIDE] if differences(saved, read) else words
