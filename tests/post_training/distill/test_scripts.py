"""A teacher attached to the stock script, which does not know of it: in two stages, saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.train import processes
from tests.support.short_run import mock_argv, short_schedule
from tests.test_layouts import CONFIG, SCRIPTS, _train

LAYOUT = ParallelLayout(pp=2)
HOW = "temperature=2,weight=0.7"


def words_of(
    folder: Path, teacher: Path | None, steps: int = 4, how: str = HOW, **model: object
) -> list[str]:
    """The student has fewer layers than the teacher."""
    schedule = short_schedule(steps, eval_iters=1, save_interval=2)
    config = CONFIG if teacher is None else CONFIG.but(pattern="ME*E", **model)
    layout = ParallelLayout() if teacher is None else LAYOUT
    argv = mock_argv(config, layout, schedule, save=str(folder), load=str(folder))
    return (
        argv if teacher is None else [*argv, "--nemotron3-teacher", str(teacher), "--nemotron3-distill", how]
    )


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_the_stock_script_learns_what_ours_does(script: Path, tmp_path: Path) -> None:
    """Ours logs both parts of the loss, the stock one what is trained; both validate cross-entropy.

    A resumed run goes on as if not cut; one with another temperature is refused.
    """
    teacher = tmp_path / "teacher"
    _train(processes.ENTRY, ParallelLayout(), words_of(teacher, None, steps=2))
    ours = _train(processes.ENTRY, LAYOUT, words_of(tmp_path / "ours", teacher))
    stock = _train(script, LAYOUT, words_of(tmp_path / "stock", teacher))
    assert sorted(stock.steps) == [1, 2, 3, 4]
    for step, one in ours.steps.items():
        trained = 0.7 * 4 * one.values["divergence"] + 0.3 * one.loss
        assert stock.steps[step].loss == pytest.approx(trained, rel=1e-5)
    assert stock.validation == pytest.approx(ours.validation, rel=1e-5)
    cut = tmp_path / "cut"
    _train(script, LAYOUT, [*words_of(cut, teacher), "--exit-interval", "2"])
    with pytest.raises(AssertionError, match=r"another distillation \(temperature 2.0 -> 1.0\)"):
        _train(script, LAYOUT, words_of(cut, teacher, how="weight=0.7"))
    resumed = _train(script, LAYOUT, words_of(cut, teacher)).steps
    assert resumed[3].loss == pytest.approx(stock.steps[3].loss, rel=1e-5)
