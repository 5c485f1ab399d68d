"""Reading Megatron's log."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_nemotron3.train import log

STEP = (
    " [2026-11-21 14:29:40.907512] iteration        3/       4 | consumed samples:           24 | "
    "elapsed time per iteration (ms): 147.1 | learning rate: 2.318020E-04 | global batch size:     8 | "
    "lm loss: 5.185680E+00 | mtp_1 loss: 5.462492E+00 | mtp_2 loss: 5.437578E+00 | loss scale: 1.0 | "
    "grad norm: 1.770 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
VALID = (
    " validation loss at iteration 4 on validation set | lm loss value: 5.047692E+00 | lm loss PPL: 156 | \n"
)


def test_a_step() -> None:
    step = log.parse(STEP)
    assert isinstance(step, log.LogStep)
    assert (step.iteration, step.total, step.loss) == (3, 4, 5.18568)
    assert step.mtp == [5.462492, 5.437578]
    assert step.seconds == pytest.approx(0.1471)
    assert step.values["grad norm"] == 1.77


def test_the_loss_of_the_step_counts_before_the_mean() -> None:
    line = STEP.replace(
        "loss scale", "lm loss of this step: 5.1E+00 | mtp_1 loss of this step: 5.4E+00 | loss scale"
    )
    step = log.parse(line)
    assert isinstance(step, log.LogStep)
    assert (step.loss, step.mtp) == (5.1, [5.4, 5.437578])
    assert step.values.keys() == log.parse(STEP).values.keys()  # type: ignore[union-attr]


def test_a_step_whose_loss_is_no_number() -> None:
    """Megatron leaves it out of its line. The step was trained nevertheless."""
    step = log.parse(STEP.replace("lm loss: 5.185680E+00 | ", ""))
    assert isinstance(step, log.LogStep)
    assert step.iteration == 3 and math.isnan(step.loss) and "lm loss" not in step.values


def test_event_files_correct_means() -> None:
    """As of models without experts. Steps and numbers that were not logged stay away."""
    curve = log.Curve()
    curve.add(STEP)
    curve.correct({"lm loss": [(1, 9.0), (3, 5.0)], "mtp_2 loss": [(3, 4.0)], "learning-rate": [(3, 1.0)]})
    assert list(curve.steps) == [3]
    assert (curve.steps[3].loss, curve.steps[3].mtp) == (5.0, [5.462492, 4.0])
    assert "learning-rate" not in curve.history


def test_a_learning_rate_of_zero_is_said() -> None:
    """Not of one line: at the end of a decay to zero the rate of the next step is zero."""
    curve, zero = log.Curve(), STEP.replace("2.318020E-04", "0.000000E+00")
    curve.add(zero)
    assert not any("learning rate" in line for line in log.verdict(curve, None))
    curve.add(zero.replace("iteration        3", "iteration        4"))
    assert "learning rate    0 at every logged step" in "\n".join(log.verdict(curve, None))
    curve.add(STEP)
    assert not any("learning rate" in line for line in log.verdict(curve, None))


def test_other_lines() -> None:
    assert log.parse(VALID) == log.Validation(4, "validation", 5.047692, again=True)
    assert log.parse(VALID.replace(" on validation set", "")) == log.Validation(4, "validation", 5.047692)
    assert log.parse(VALID.replace("on validation", "on test")) == log.Validation(
        4, "test", 5.047692, again=True
    )
    assert log.parse("[after training is done] iteration 3/4") is None
    assert log.parse("") is None


def test_a_step_trained_twice_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(STEP + STEP.replace("5.185680E+00", "5.0E+00") + VALID)
    curve = log.read(str(file))
    assert [s.loss for s in curve.steps.values()] == [5.0]
    assert curve.validation == {4: 5.047692}
    assert log.read(str(tmp_path / "none")).steps == {}


def test_the_last_step_is_evaluated_twice(tmp_path: Path) -> None:
    """In the training loop, and after it on the next batches: the first one is the step's loss."""
    file = tmp_path / "train.log"
    file.write_text(VALID.replace(" on validation set", "") + VALID.replace("5.047692E", "5.5E"))
    assert log.read(str(file)).validation == {4: 5.047692}
