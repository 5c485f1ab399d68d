"""Layouts, schedules and pipeline cuts on their own."""

from __future__ import annotations

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.args import (
    ParallelLayout,
    TrainingSchedule,
    cut_pattern,
    published,
    published_layout,
    smoke,
)
from megatron_nemotron3.args.pipeline import last_stage_cost, layer_cost
from megatron_nemotron3.models.pattern import parse


def test_layout_derives() -> None:
    layout = ParallelLayout(tp=2, pp=4, cp=2, dp=8, ep=16)
    assert (layout.world_size, layout.edp, layout.sequence_parallel) == (128, 2, True)
    assert str(layout) == "TP2 PP4 EP16 CP2 DP8 SP"
    assert str(ParallelLayout()) == "1 rank"
    assert ParallelLayout(tp=2, sp=False).sequence_parallel is False


@pytest.mark.parametrize(
    "sizes", [{"tp": 0}, {"ep": -1}, {"dp": 1.0}, {"cp": True}, {"sp": 1}, {"pp": "2"}, {"etp": None}]
)
def test_layout_refuses(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(("name", "ranks"), [("nano", 3072), ("super", 3072), ("ultra", 6144)])
def test_published_layouts_have_the_published_size(name: str, ranks: int) -> None:
    layout = published_layout(models.get(name))
    assert layout is not None
    assert layout.world_size == ranks
    assert published_layout(models.get(f"{name}-tiny")) is None


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


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_smoke_schedule_reaches_every_phase(iters: int) -> None:
    schedule = smoke(models.get("super-tiny"), iters)
    assert schedule.unknown == ()
    assert (schedule.lr_warmup_iters or 0) < iters
    assert 1 <= (schedule.lr_wsd_decay_iters or 0) <= iters


def test_published_without_source_stays_none() -> None:
    schedule = published(models.LIGHTNING)
    assert schedule.unknown == ("train", "lr", "min_lr")
    assert schedule.global_batch_size is None


@pytest.mark.parametrize("name", [*models.names(), "super-tiny"])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_cut_keeps_the_layers(name: str, pp: int, vpp: int) -> None:
    config = models.get(name)
    parsed = parse(cut_pattern(config, ParallelLayout(pp=pp, vpp=vpp)))
    assert len(parsed.stages) == pp * vpp
    assert parsed.main == config.pattern
    assert "".join(f"/{depth}" for depth in parsed.mtp) == config.full_pattern.removeprefix(config.pattern)


def test_cut_balances_the_work_not_the_layers() -> None:
    """Ultra on 4 stages: the most loaded is within 5 % of the mean; equal layer counts are not."""
    config, seq = models.ULTRA, 8192

    def worst(stages: tuple[str, ...]) -> float:
        costs = [sum(layer_cost(config, kind, seq) for kind in stage) for stage in stages]
        costs[-1] += last_stage_cost(config, seq)
        return max(costs) / (sum(costs) / len(costs))

    ours = parse(cut_pattern(config, ParallelLayout(pp=4))).stages
    equal = tuple(config.pattern[i : i + 27] for i in range(0, 108, 27))
    assert worst(ours) < 1.05 < worst(equal)
    assert len(ours[-1]) < 27  # the output layer and MTP take the place of layers


def test_layer_cost_terms() -> None:
    """Only attention grows with the sequence; the scan does not beyond one chunk."""
    config = models.SUPER
    for kind in "ME":
        assert layer_cost(config, kind, 1 << 20) == layer_cost(config, kind, 8192)
    grown = layer_cost(config, "*", 2 * 8192) - layer_cost(config, "*", 8192)
    # Two GEMMs (QK and PV) of 2 FLOPs over half the sequence.
    assert grown == 2 * 2 * (8192 / 2) * config.num_attention_heads * config.kv_channels
