"""The same numbers from every layout, through Megatron's own loop: log line and TensorBoard file."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.models.series import KINDS
from megatron_nemotron3.train import log, processes
from megatron_nemotron3.train.monitor import events
from megatron_nemotron3.train.progress import TrainProgress
from tests.support.distributed import curve_of, run_launcher
from tests.support.short_run import mock_argv, short_schedule

#: Every part: M, E with a latent width, *, two MTP depths that share their weights.
CONFIG = tiny(get("super")).but(pattern="EM*E", vocab_size=255)
STEPS = 2
LAYOUTS = {
    "one": (ParallelLayout(), ()),
    "tp2-sp": (ParallelLayout(tp=2), ()),
    "ep2": (ParallelLayout(dp=2, ep=2), ()),
    "pp2": (ParallelLayout(pp=2), ()),
    "pp2-vpp2": (ParallelLayout(pp=2, vpp=2), ()),
    "dp2": (ParallelLayout(dp=2), ()),
    "dp2-distributed-optimizer": (ParallelLayout(dp=2), ("--use-distributed-optimizer",)),
    "cp2": (ParallelLayout(cp=2), ()),
    "tp2-ep2": (ParallelLayout(tp=2, ep=2), ("--use-distributed-optimizer",)),
    "recompute": (
        ParallelLayout(),
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}
#: Sums in another order move the last digits.
RTOL = 2e-5


def argv(layout: ParallelLayout, extra: tuple[str, ...], steps: int = STEPS, **data: object) -> list[str]:
    """A short run on mock data."""
    # Adam's first step is lr whatever the gradient: where that is rounding alone, layouts part ways.
    return mock_argv(CONFIG, layout, short_schedule(steps, lr=1e-6, min_lr=1e-7), extra, **data)


def train(words: list[str], layout: ParallelLayout, script: Path = processes.ENTRY) -> str:
    """What the run prints."""
    return run_launcher(["--device", "cpu", str(script), *words], layout.world_size)


@functools.cache
def folder() -> Path:
    """Kept for all tests of this module, removed with the process."""
    keep = tempfile.TemporaryDirectory(prefix="monitor-tests-")
    _KEPT.append(keep)
    return Path(keep.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def weights() -> str:
    """A checkpoint of one process, so that every layout starts from the same weights."""
    target = str(folder() / "weights")
    with mock.patch.dict(os.environ):
        os.environ.pop("NEMOTRON3_MONITOR", None)
        output = train(argv(ParallelLayout(), (), steps=1, save=target), ParallelLayout())
    assert "lm loss" in output and "worst MaxVio" in output  # on by default, and the first step is measured
    return target


@functools.cache
def run(name: str) -> tuple[dict[int, log.LogStep], events.History]:
    """(log lines, TensorBoard series) of two steps from those weights."""
    layout, extra = LAYOUTS[name]
    board = folder() / name
    words = argv(
        layout,
        (*extra, "--finetune", "--no-load-optim", "--no-load-rng"),
        load=weights(),
        tensorboard_dir=str(board),
    )
    with mock.patch.dict(os.environ, {"NEMOTRON3_MONITOR": "1"}):
        curve = curve_of(train(words, layout))
    return curve.steps, events.read(events.find(board))


def monitored(history: events.History) -> dict[str, dict[int, float]]:
    """Our series alone."""
    return {tag: dict(points) for tag, points in history.items() if tag.split("/")[0] in {*KINDS, "monitor"}}


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "one"])
def test_every_layout_reports_what_one_process_does(name: str) -> None:
    """All values of a layout are those of one process."""
    lines, history = run(name)
    expected_lines, expected = run("one")
    ours, theirs = monitored(history), monitored(expected)
    assert ours.keys() == theirs.keys()
    # The padding of the vocabulary, which takes part in the loss, depends on the layout.
    theirs["monitor/lm_loss"] = dict(history["lm loss"])
    for tag, points in theirs.items():
        for step, value in points.items():
            zero = 2e-6 if "zero" in tag else 0.0  # rounding makes or breaks a zero once in a while
            if tag in ("unchanged_weights/embedding", "unchanged_weights/output_layer"):
                zero = 1 / 256  # a row of padding, which gets no gradient
            assert ours[tag][step] == pytest.approx(value, rel=RTOL, abs=zero), (tag, step)
    for step in expected_lines:
        for item in LINE:
            assert lines[step].values[item] == pytest.approx(
                expected_lines[step].values[item], rel=2e-2, abs=1e-3
            )


LINE = ("worst MaxVio", "in a micro-batch", "dead experts", "residual RMS last/first", "zero gradients")


@pytest.mark.full
def test_the_real_log_line_and_tensorboard_agree() -> None:
    """Of one process, at every step. Which rows the series have, and their values: test_values.py."""
    lines, history = run("one")
    assert sorted(lines) == [1, 2]
    series = monitored(history)
    assert {tag.split("/")[0] for tag in series} == {*KINDS, "monitor"}
    for tag, points in series.items():
        assert sorted(points) == ([2] if tag.startswith("unchanged_weights/") else [1, 2]), tag
    for step, line in lines.items():
        worst = max(points[step] for tag, points in series.items() if tag.startswith("max_vio/"))
        assert line.values["worst MaxVio"] == pytest.approx(worst, abs=6e-3)
        assert line.values["dead experts"] == series["monitor/dead_experts"][step]
        share = 100 * series["monitor/zero_gradients"][step]
        assert line.values["zero gradients"] == pytest.approx(share, abs=1e-3)
        # Megatron's own series.
        assert series["monitor/lm_loss"][step] == pytest.approx(dict(history["lm loss"])[step], rel=1e-6)
        assert line.values["lm loss"] == pytest.approx(dict(history["lm loss"])[step], rel=1e-6)
        assert len(line.mtp) == 2  # what stands around it is still read


HURT = Path(__file__).parents[2] / "support" / "hurt_script.py"


def test_a_warning_is_in_the_log_in_nemotron3_train_and_in_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One layer without gradients: the second measurement says so, once."""
    words = argv(ParallelLayout(), (), steps=4, tensorboard_dir=str(tmp_path))
    environment = {
        "NEMOTRON3_MONITOR": "1",
        "PYTHONPATH": f"{HURT.parents[2]}:{os.environ.get('PYTHONPATH')}",
    }
    with mock.patch.dict(os.environ, environment):
        output = train([str(processes.ENTRY), *words], ParallelLayout(), HURT)
    (line,) = (line for line in output.splitlines() if "WARNING: iteration" in line)
    assert line.startswith(
        "megatron_nemotron3: WARNING: iteration 2: 100.0 % of the gradients of layer 2 are "
    )

    capsys.readouterr()
    progress = TrainProgress()
    for printed in output.splitlines():
        progress.line(f"{printed}\n")
    assert line in capsys.readouterr().out.splitlines()

    assert cli.main(["report", "monitors", str(tmp_path), "--output", str(tmp_path / "x.png")]) == 0
    assert line.removeprefix("megatron_nemotron3: ") in capsys.readouterr().out.splitlines()


@pytest.mark.full
def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """Same values after a resume as without a break; its first step is measured, as Megatron prints it."""
    layout = ParallelLayout()
    with mock.patch.dict(os.environ, {"NEMOTRON3_MONITOR": "2"}):
        boards = {name: tmp_path / name for name in ("whole", "parts")}
        train(argv(layout, (), steps=4, tensorboard_dir=str(boards["whole"])), layout)
        kept = {"save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
        words = argv(layout, ("--exit-interval", "2"), steps=4, tensorboard_dir=str(boards["parts"]), **kept)
        train(words, layout)
        train(argv(layout, (), steps=4, tensorboard_dir=str(boards["parts"]), **kept), layout)
    whole, parts = (monitored(events.read(events.find(board))) for board in boards.values())
    assert whole.keys() == parts.keys()
    for tag, points in whole.items():
        # Unchanged weights are those of the step that was measured before.
        first = set() if tag.startswith("unchanged_weights/") else {1, 3}
        assert set(points) == {2, 4} | first - {3} and set(parts[tag]) == {2, 4} | first
        if "interval" not in tag:  # the interval of step 4 began at the resume
            same = {i: value for i, value in points.items() if first or i == 2}
            assert {i: parts[tag][i] for i in same} == pytest.approx(same, rel=1e-6)
