"""A pipeline stage without E layers: it trains, logs, saves and resumes like one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.train import log
from tests.support import distributed
from tests.support.short_run import mock_argv, short_schedule

#: Cut in two, the only E layer is on the last stage; MTP has none.
LAST = tiny(get("super")).but(
    pattern="M*-M*E", mtp_pattern="-*M", mtp_num_layers=2, dense_ffn_hidden_size=256, vocab_size=255
)
#: The only E layer is on the first stage.
FIRST = LAST.but(pattern="ME*-M*-")
STEPS = 5


def _train(config, layout: ParallelLayout, *extra: str, **folders: str) -> log.Curve:
    schedule = short_schedule(STEPS, seq_length=32, global_batch_size=4)
    argv = mock_argv(config, layout, schedule, extra, **folders)
    return distributed.trained(argv, layout.world_size)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        pytest.param(LAST, ParallelLayout(pp=2), id="E on the last stage", marks=pytest.mark.full),
        pytest.param(FIRST, ParallelLayout(pp=2), id="E on the first stage", marks=pytest.mark.full),
        # The experts' optimizer of the first stage exists and has no parameters.
        pytest.param(LAST, ParallelLayout(pp=2, tp=2, ep=2), id="TP 2 EP 2", marks=pytest.mark.full),
        pytest.param(LAST, ParallelLayout(pp=2, dp=2), id="DP 2", marks=pytest.mark.full),
    ],
)
def test_trains_saves_and_resumes_like_one_process(config, layout, tmp_path: Path) -> None:
    """Both go on from the stages' second step, the one process with the weights alone."""
    folder = str(tmp_path)
    first = _train(config, layout, "--exit-interval", "2", save=folder)
    alone = _train(config, ParallelLayout(), "--no-load-optim", "--exit-interval", "3", load=folder)
    then = _train(config, layout, load=folder)
    assert (list(first.steps), list(alone.steps), list(then.steps)) == ([1, 2], [3], [3, 4, 5])
    assert then.steps[3].loss == pytest.approx(alone.steps[3].loss, rel=2e-3)
    assert then.steps[3].mtp == pytest.approx(alone.steps[3].mtp, rel=2e-3)
    assert then.steps[5].loss < first.steps[1].loss
