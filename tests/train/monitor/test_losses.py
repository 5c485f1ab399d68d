"""The losses of the log line are those of the event files: fresh, and resumed within an interval."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.timers import Timer

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.models.series import OF_STEP
from megatron_nemotron3.train import log, processes
from megatron_nemotron3.train.monitor import events, losses
from tests.support.distributed import curve_of, run_launcher
from tests.support.short_run import mock_argv, short_schedule

#: Routers and two MTP depths.
CONFIG = tiny(get("super")).but(pattern="EM", vocab_size=255)
LOSSES = ("lm loss", "mtp_1 loss", "mtp_2 loss", "seq_load_balancing_loss")
STEPS, INTERVAL, SAVED = 6, 3, 2
#: Half of the last printed digit, of numbers from 0.1 on.
DIGITS = 5e-6


def train(folder: Path, *options: str, interval: int = INTERVAL, **data: str) -> tuple[str, events.History]:
    """What a run prints, and its event files."""
    schedule = short_schedule(STEPS, log_interval=interval, global_batch_size=2)
    words = mock_argv(CONFIG, ParallelLayout(), schedule, options, tensorboard_dir=str(folder), **data)
    printed = run_launcher(["--monitor", "0", "--device", "cpu", str(processes.ENTRY), *words], 1)
    return printed, events.read(events.find(folder))


def printed_means(output: str) -> dict[int, dict[str, float]]:
    """Iteration -> losses under Megatron's own names."""
    found = {}
    for line in output.splitlines():
        if isinstance(step := log.parse(line.replace(OF_STEP, " apart")), log.LogStep):
            found[step.iteration] = {name: step.values[name] for name in LOSSES}
    return found


def mean(history: events.History, name: str, first: int, last: int) -> float:
    values = [value for iteration, value in history[name] if first <= iteration <= last]
    assert len(values) == last - first + 1
    return sum(values) / len(values)


def test_lines_and_event_files_have_the_same_losses(tmp_path: Path) -> None:
    output, history = train(tmp_path / "whole")
    steps, means = curve_of(output).steps, printed_means(output)
    assert sorted(steps) == [1, 3, 6]
    saved = str(tmp_path / "saved")
    train(tmp_path / "begun", "--exit-interval", str(SAVED), save=saved)
    again, its_history = train(tmp_path / "resumed", load=saved)
    resumed, its_means = curve_of(again).steps, printed_means(again)
    assert sorted(resumed) == [3, 6]
    for name in LOSSES:
        of_step = dict(history[name])
        assert dict(its_history[name]) == {i: v for i, v in of_step.items() if i > SAVED}
        for found in (steps, resumed):
            values = {iteration: step.values[name] for iteration, step in found.items()}
            assert values == pytest.approx({i: of_step[i] for i in found}, rel=DIGITS), name
        # Megatron's own numbers stay means over the interval. The first line of a process has its first step.
        intervals = {1: (1, 1), 3: (1, 3), 6: (4, 6)}
        assert {i: m[name] for i, m in means.items()} == pytest.approx(
            {i: mean(history, name, *steps) for i, steps in intervals.items()}, rel=DIGITS
        )
        assert its_means[3][name] == pytest.approx(of_step[3], rel=DIGITS)
        assert its_means[6][name] == means[6][name], "not over step 3 as well"


def test_the_second_line_is_that_of_the_second_step(tmp_path: Path) -> None:
    output, history = train(tmp_path, "--exit-interval", "2", interval=1)
    means = printed_means(output)
    assert sorted(means) == [1, 2] and OF_STEP not in output
    for iteration, values in means.items():
        assert values == pytest.approx({name: dict(history[name])[iteration] for name in LOSSES}, rel=DIGITS)


def test_counters_and_timers_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer keeps what it measured after the line; one that was read meanwhile has nothing to give up."""
    timers = {name: Timer(name) for name in ("interval-time", "eval-time", "forward-backward")}
    for timer, seconds in zip(timers.values(), (5.0, 0.25, 2.0)):
        timer.set_elapsed(seconds)
    monkeypatch.setattr(losses, "_timers", lambda: timers)
    sums = {"advanced iterations": 1, "nan iterations": 1, "lm loss": torch.tensor([8.0])}
    losses._begin_again(sums, {"interval-time": 3.0, "eval-time": 1.0}, None)
    assert sums == {"advanced iterations": 0, "nan iterations": 0, "lm loss": torch.tensor([0.0])}
    assert [timer.elapsed() for timer in timers.values()] == [2.0, 0.0, 2.0]
