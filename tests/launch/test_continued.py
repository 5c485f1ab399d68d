"""The learning rate of a resumed run, against Megatron's own scheduler."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.state import StoredState
from megatron_nemotron3.launch.continued import (
    KEEP,
    OVERRIDE,
    Saved,
    Schedule,
    continued,
    differences,
    require_loadable_layout,
    saved_schedule,
    schedule_of_arguments,
)

PEAK, MINIMUM = 4e-3, 4e-5
_RATES = ["--lr", str(PEAK), "--min-lr", str(MINIMUM), "--lr-decay-style"]


def _words(steps: int, *more: str, unit: str = "iters", batch: int = 4, style: str = "WSD") -> list[str]:
    """A command line as `nemotron3 train --steps` makes it."""
    size = batch if unit == "samples" else 1
    lengths = {
        "train": steps,
        "lr-warmup": steps // 10,
        "lr-decay": steps,
        "lr-wsd-decay": max(1, steps // 5),
    }
    words = [word for name, n in lengths.items() for word in (f"--{name}-{unit}", str(n * size))]
    return [
        *words,
        "--global-batch-size",
        str(batch),
        *_RATES,
        style,
        "--lr-wsd-decay-style",
        "minus_sqrt",
        *more,
    ]


def _scheduler(words: list[str]) -> Any:
    """Megatron's scheduler, made of a command line as its `get_optimizer_param_scheduler` makes it."""
    pytest.importorskip("megatron.core")
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    found = schedule_of_arguments(words)
    assert found is not None
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[{}]),  # type: ignore[arg-type]
        init_lr=found.init,
        max_lr=found.lr,
        min_lr=found.min_lr,
        lr_warmup_steps=found.warmup,
        lr_decay_steps=found.decay_end,
        lr_decay_style=found.style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=found.train * found.per_unit,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=KEEP in words,
        override_opt_param_scheduler=OVERRIDE in words,
        wsd_decay_steps=found.wsd_decay,
        lr_wsd_decay_style=found.wsd_style,
    )


def _saved(scheduler: Any, words: list[str], step: int) -> Saved:
    """What a checkpoint of that moment holds."""
    found = schedule_of_arguments(words)
    assert found is not None
    size = 1 if found.unit == "samples" else found.batch
    args = {
        f"train_{found.unit}": found.train,
        "global_batch_size": found.batch,
        "lr_warmup_init": found.init,
        f"lr_wsd_decay_{found.unit}": None if found.wsd_decay is None else found.wsd_decay / size,
        "lr_wsd_decay_style": found.wsd_style,
        "consumed_train_samples": scheduler.num_steps,
    }
    saved = saved_schedule(step, scheduler.state_dict(), args)
    assert saved is not None
    return saved


def _merged(words: list[str], more: list[str]) -> list[str]:
    """As `flags`: the last value of an option counts."""
    return [*words, *more]


def _rate(scheduler: Any) -> float:
    return float(scheduler.optimizer.param_groups[0]["lr"])


@settings(max_examples=80)
@example(24, 15, 16, "iters", "WSD", True, 6)  # the warm-up of 8 samples becomes 2 iterations of 6
@example(40, 4, 104, "iters", "inverse-square-root", False, 6)  # at the peak, within a rounding error
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 120),
    st.sampled_from(["iters", "samples"]),
    st.sampled_from(["WSD", "cosine", "linear", "constant", "inverse-square-root"]),
    st.booleans(),
    st.sampled_from([2, 4, 6]),
)
def test_the_rate_goes_on_from_where_it_is(
    first: int, at: int, total: int, unit: str, style: str, keep: bool, batch: int
) -> None:
    """For any first length, moment, new length and batch: Megatron loads it, and no rate jumps."""
    at = min(at, first)
    total = max(total, at + 1)
    words = _words(first, unit=unit, style=style)
    begun = _scheduler(words)
    begun.step(4 * at)
    saved = _saved(begun, words, at)
    new = _words(total, unit=unit, style=style, batch=batch)
    wanted = schedule_of_arguments(new)
    assert wanted is not None
    left = max(0, total - (at if unit == "iters" else 4 * at // batch))
    more, lines = continued(saved, wanted, keep=keep)
    merged = _merged(new, more)
    resumed = _scheduler(merged)
    resumed.load_state_dict(begun.state_dict())  # asserts that the lengths agree, unless told to override
    assert resumed.num_steps == 4 * at
    # A schedule counts whole steps, so another batch moves its borders by less than one.
    aligned = batch == 4 or (not keep and left >= 2 and saved.clock % batch == 0)
    if aligned and style != "inverse-square-root":
        assert _rate(resumed) == pytest.approx(_rate(begun), rel=1e-6, abs=1e-15)
    same = (total, batch) == (first, 4)
    assert bool(lines) != same and len(lines) <= 1
    plan = schedule_of_arguments(merged)
    assert plan is not None
    rates = []
    for _ in range(left):
        resumed.step(batch)
        rates.append(_rate(resumed))
        assert _rate(resumed) == pytest.approx(plan.rate(resumed.num_steps), rel=1e-9)
    assert all(MINIMUM * 0.999 <= rate <= PEAK * 1.001 for rate in rates[1:])
    if not keep and style in ("WSD", "cosine", "linear") and left > 2 and not same:
        assert rates[-1] == pytest.approx(MINIMUM, rel=1e-6)
        if style == "WSD" and aligned:
            assert max(rates) == pytest.approx(PEAK, rel=1e-6)
    # The next start with the same command line changes nothing any more.
    again, silent = continued(_saved(resumed, merged, at + left), wanted, keep=keep)
    assert silent == [] and OVERRIDE not in again
    _scheduler(_merged(new, again)).load_state_dict(resumed.state_dict())


def test_three_steps_then_six() -> None:
    words = _words(3)
    begun = _scheduler(words)
    begun.step(12)
    wanted = schedule_of_arguments(_words(6))
    assert wanted is not None
    saved = _saved(begun, words, 3)
    assert differences(saved, wanted) == {"lr_decay_steps": (12, 24), "wd_incr_steps": (12, 24)}
    with pytest.raises(AssertionError, match="12|24"):  # what a user saw
        _scheduler(_words(6)).load_state_dict(begun.state_dict())
    more, (line,) = continued(saved, wanted)
    assert line == (
        "schedule planned anew from step 3: learning rate 4e-05, up to 0.004 at step 4, from step 5 down to "
        "4e-05 at step 6 (-- --use-checkpoint-opt-param-scheduler keeps the old one)"
    )
    held, (line,) = continued(saved, wanted, keep=True)
    assert line == "the checkpoint's schedule is kept: learning rate 4e-05"
    resumed = _scheduler(_merged(_words(6), held))
    resumed.load_state_dict(begun.state_dict())
    resumed.step(4)
    assert _rate(resumed) == MINIMUM and more != held


def test_another_unit_is_refused() -> None:
    words = _words(3)
    begun = _scheduler(words)
    wanted = schedule_of_arguments(_words(6, unit="samples"))
    assert wanted is not None
    with pytest.raises(ValueError, match="trained with --train-iters: give the length with --train-iters"):
        continued(_saved(begun, words, 3), wanted)


def test_other_rates_are_refused() -> None:
    """Megatron ends in a KeyError: it finds the optimizer's parameter groups by their rates."""
    words = _words(3)
    begun = _scheduler(words)
    wanted = schedule_of_arguments([*_words(6), "--lr", "2e-3"])
    assert wanted is not None
    with pytest.raises(ValueError, match=r"trained with --lr 0.004 .* with --lr 0.002"):
        continued(_saved(begun, words, 3), wanted)


def test_another_layout_of_an_optimizer_without_names_is_refused() -> None:
    """Megatron ends in a RuntimeError when all ranks have started."""
    sizes = {"tensor_model": 2, "pipeline_model": 1, "expert_tensor": 2}
    dense = {f"{name}_parallel_size": size for name, size in sizes.items()}
    saved = {**dense, "num_experts": 8}
    by_rank = StoredState(saved, {}, "dp_reshardable")

    def words(tp: int, pp: int, *more: str) -> list[str]:
        given = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
        return [*given, "--use-distributed-optimizer", *more]

    for other, old, new in (
        (words(1, 1), "TP=2 ETP=2", "TP=1 ETP=1"),
        (words(2, 2), "PP=1", "PP=2"),
        (words(2, 1, "--expert-model-parallel-size", "8"), "EP=1", "EP=8"),
        (words(2, 1, "--expert-tensor-parallel-size", "1"), "ETP=2", "ETP=1"),
        (["--use-distributed-optimizer"], "TP=2 ETP=2", "TP=1 ETP=1"),
    ):
        with pytest.raises(ValueError, match=f"step 7 was saved at {old}, .*not at {new}: .*--no-load-optim"):
            require_loadable_layout(7, by_rank, other)
    for same in (words(2, 1), words(4, 1, "--no-load-optim"), words(1, 1, "--finetune"), words(4, 1)[:-1]):
        require_loadable_layout(7, by_rank, same)
    require_loadable_layout(7, StoredState(saved, {}, "fully_reshardable"), words(4, 1))
    none_saved = StoredState({**saved, "no_save_optim": True}, {}, "dp_reshardable")
    require_loadable_layout(7, none_saved, words(4, 1))
    require_loadable_layout(7, StoredState(saved, {}), words(4, 1))
    etp1 = words(2, 1, "--expert-tensor-parallel-size", "1")
    require_loadable_layout(7, StoredState(dense, {}, "dp_reshardable"), etp1)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--lr", "x"],
        ["word"],
        ["--train-iters", "5"],
        [*_words(3), "--finetune"],
        [*_words(3), "--lr", "nan"],
    ],
)
def test_a_command_line_that_leaves_something_open(words: list[str]) -> None:
    assert schedule_of_arguments(words) is None


def test_a_checkpoint_without_a_schedule() -> None:
    assert saved_schedule(3, {}, {}) is None
    assert saved_schedule(3, {"max_lr": 1.0}, {"train_iters": 3, "global_batch_size": None}) is None


def test_rates_of_every_style() -> None:
    for style in ("WSD", "cosine", "linear", "constant", "inverse-square-root"):
        for decay in ("linear", "cosine", "exponential", "minus_sqrt"):
            words = [*_words(40, style=style), "--lr-wsd-decay-style", decay, "--lr-warmup-init", "1e-4"]
            own, scheduler = schedule_of_arguments(words), _scheduler(words)
            assert isinstance(own, Schedule)
            for _ in range(45):
                assert math.isclose(own.rate(scheduler.num_steps), _rate(scheduler), rel_tol=1e-9)
                scheduler.step(4)
