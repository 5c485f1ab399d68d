"""Schedules: the published ones in tokens, short ones, and changed parts."""

from __future__ import annotations

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import TrainingSchedule, adjusted, published
from megatron_nemotron3.launch.phases import phase


@pytest.mark.parametrize(
    ("name", "warmup_tokens", "after_decay"), [("nano", 8.4e9, 1.02e6), ("super", 200e9, 3.1e6)]
)
def test_published_schedule_in_tokens(name: str, warmup_tokens: float, after_decay: float) -> None:
    """The samples of the launch scripts are the tokens of the reports: 25T, of which 5T are decay."""
    config = models.get(name)
    schedule = published(config)
    tokens = {
        field: (schedule.length(field) or 0) * config.seq_length
        for field in ("train", "lr_warmup", "lr_wsd_decay")
    }
    assert tokens["train"] == pytest.approx(25e12, rel=1e-6)
    assert tokens["lr_wsd_decay"] == pytest.approx(5e12, rel=1e-6)
    assert tokens["lr_warmup"] == pytest.approx(warmup_tokens, rel=0.002)
    assert (schedule.train_samples or 0) - (schedule.lr_decay_samples or 0) == pytest.approx(
        after_decay, rel=0.02
    )


def test_schedule_refuses_two_units() -> None:
    with pytest.raises(ValueError, match="train_samples=5 and lr_warmup_iters=1"):
        TrainingSchedule(train_samples=5, lr_warmup_iters=1)
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        TrainingSchedule(micro_batch_size=0)
    assert TrainingSchedule(train_iters=1).unit == "iters"
    assert TrainingSchedule(train_samples=1, lr_warmup_samples=0).unit == "samples"


def test_the_minimum_follows_the_peak() -> None:
    ultra = phase(models.ULTRA, "sft").schedule
    assert adjusted(ultra, lr=3e-5).min_lr == pytest.approx(2e-6)
    assert adjusted(ultra, steps=300).lr_decay_samples == 300 * 64
    assert adjusted(phase(models.SUPER, "sft").schedule, lr=3e-5).min_lr is None
    assert adjusted(TrainingSchedule(), lr=1e-3).min_lr == 1e-5
