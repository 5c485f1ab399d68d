"""Heads and a student of a teacher in scripts, ours and the stock one: in two stages, saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.common.switches import BOOST
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.train import processes
from tests.support.short_run import mock_argv, short_schedule
from tests.test_layouts import CONFIG, SCRIPTS, _train

LAYOUT = ParallelLayout(pp=2)
STEPS = 4
HOW = "temperature=2,weight=0.7"


@pytest.mark.parametrize(
    "script", [pytest.param(processes.ENTRY, id="ours", marks=pytest.mark.full), SCRIPTS[1]]
)
def test_heads_train_save_and_resume(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first stage has nothing to train. As "lm loss" Megatron logs that of the heads, which falls, and
    a resumed run goes on as if not cut."""
    monkeypatch.setenv(BOOST, "mix=0.5")

    def run(folder: Path, *extra: str, pretrained: Path | None = None) -> dict[int, float]:
        start = () if pretrained is None else ("--pretrained-checkpoint", str(pretrained))
        given = {"save": str(folder), "load": str(folder)}
        argv = mock_argv(CONFIG, LAYOUT, short_schedule(STEPS, save_interval=2), (*extra, *start), **given)
        return {step: one.loss for step, one in _train(script, LAYOUT, argv).steps.items()}

    whole = run(tmp_path / "whole")
    assert sorted(whole) == [1, 2, 3, 4] and whole[4] < whole[1] < 2
    run(tmp_path / "cut", "--exit-interval", "2")
    resumed = run(tmp_path / "cut")
    assert sorted(resumed) == [3, 4] and resumed[3] == pytest.approx(whole[3], rel=1e-5)
    # Of the weights only MTP's differ between two checkpoints.
    capfd.readouterr()
    places = [str(tmp_path / "whole" / f"iter_000000{step}") for step in (2, 4)]
    assert cli.main(["convert", "verify", "--json", *places]) == 1
    differ = [one["tensor"] for one in json.loads(capfd.readouterr().out)["differences"]]
    assert differ and all(name.startswith("mtp.layers.") for name in differ)


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
