"""Heads trained by scripts, ours and the stock one, in two stages: the first has nothing to train."""

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


@pytest.mark.parametrize(
    "script", [pytest.param(processes.ENTRY, id="ours", marks=pytest.mark.full), SCRIPTS[1]]
)
def test_trains_saves_and_resumes(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As "lm loss" Megatron logs that of the heads, which falls, and a resumed run goes on as if not cut."""
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
    assert cli.main(["verify", "--json", *places]) == 1
    differ = [one["tensor"] for one in json.loads(capfd.readouterr().out)["differences"]]
    assert differ and all(name.startswith("mtp.layers.") for name in differ)
