"""Layouts, schedules and pipeline cuts on their own."""

from __future__ import annotations

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.args import (
    Launch,
    ParallelLayout,
    TrainingSchedule,
    adjusted,
    check,
    cut_pattern,
    published,
    published_layout,
    smoke,
)
from megatron_nemotron3.args.layout import last_stage_cost
from megatron_nemotron3.args.phases import PHASES, Phase, phase, require_known
from megatron_nemotron3.models.flops import layer_flops as layer_cost
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


def all_phases() -> list[tuple[str, str, Phase]]:
    """(model, phase's name, phase) of everything after pre-training."""
    found = []
    for model in ("nano", "super", "ultra"):
        for name in PHASES[1:]:
            try:
                found.append((model, name, phase(models.get(model), name)))
            except ValueError:
                continue
    return found


def test_long_context_steps_are_the_published_tokens() -> None:
    def tokens(model: str, name: str) -> int:
        schedule = phase(models.get(model), name).schedule
        return (schedule.seq_length or 0) * (schedule.global_batch_size or 0) * (schedule.train_iters or 0)

    assert tokens("super", "long-context") == pytest.approx(34e9, rel=3e-4)
    steps = [phase(models.ULTRA, name).schedule for name in ("long-context", "long-context-4k")]
    assert {(s.seq_length or 0) * (s.global_batch_size or 0) for s in steps} == {25_165_824}
    long, short = (s.train_iters or 0 for s in steps)
    assert long / (long + short) == pytest.approx(0.92, abs=1e-3)
    assert tokens("ultra", "long-context") + tokens("ultra", "long-context-4k") == pytest.approx(
        33e9, rel=3e-4
    )


def test_long_context_goes_on_with_the_rate_pretraining_ends_with() -> None:
    for model, name, found in all_phases():
        if name.startswith("long-context"):
            assert found.schedule.lr == published(models.get(model)).min_lr


def test_published_phases_pass_the_rules() -> None:
    """Where the layout is published; MTP's weight under CP is right to 1 % at 1M."""
    for model, _, found in all_phases():
        if found.layout is not None:
            assert (
                check(
                    Launch.of(
                        models.get(model),
                        found.layout,
                        precision="bf16",
                        backend="te",
                        schedule=adjusted(found.schedule, steps=10),
                    )
                )
                == []
            )


def test_fine_tuning_with_mtp_wants_cp_1() -> None:
    """NVIDIA's configuration of Ultra has CP 8."""
    found = phase(models.ULTRA, "sft")
    layout = ParallelLayout(tp=2, pp=6, cp=8, ep=32, dp=2)
    violations = check(
        Launch.of(
            models.ULTRA, layout, precision="bf16", backend="te", schedule=found.schedule, extra=found.options
        )
    )
    assert [v.rule for v in violations] == ["masked-mtp-cp"]


def test_unknown_of_a_phase_is_asked_for() -> None:
    for model, name, found in all_phases():
        config, schedule = models.get(model), adjusted(found.schedule, steps=10, global_batch_size=8)
        require_known(config, name, schedule, ("--lr-decay-style",))
        if "train" in found.schedule.unknown:
            with pytest.raises(ValueError, match="no source states train.*STEPS"):
                require_known(config, name, found.schedule, ("--lr-decay-style",))
    with pytest.raises(ValueError, match="lr_decay_style .*give --lr-decay-style"):
        require_known(models.NANO, "sft", phase(models.NANO, "sft").schedule)
    with pytest.raises(ValueError, match="nano has no published phase sft-2: use published, long-context,"):
        phase(models.NANO, "sft-2")
    with pytest.raises(ValueError, match="super-tiny has no published phase"):
        phase(models.get("super-tiny"), "long-context")


def test_steps_of_a_phase_keep_its_warmup_if_it_ends() -> None:
    schedule = phase(models.SUPER, "sft").schedule
    long, short = adjusted(schedule, steps=5000), adjusted(schedule, steps=10)
    assert (long.train_samples, long.lr_warmup_samples) == (320_000, 30_000)
    assert (short.train_samples, short.lr_warmup_samples) == (640, 64)
    assert long.unknown == short.unknown == ()
    nano = adjusted(phase(models.NANO, "sft").schedule, steps=100)
    assert (nano.train_iters, nano.lr_warmup_iters, nano.train_samples) == (100, 10, None)
    # Samples of a step that nobody knows cannot be counted.
    assert adjusted(phase(models.NANO, "long-context-4k").schedule, steps=7).train_iters == 7


def test_the_minimum_follows_the_peak() -> None:
    ultra = phase(models.ULTRA, "sft").schedule
    assert adjusted(ultra, lr=3e-5).min_lr == pytest.approx(2e-6)
    assert adjusted(ultra, steps=300).lr_decay_samples == 300 * 64
    assert adjusted(phase(models.SUPER, "sft").schedule, lr=3e-5).min_lr is None
    assert adjusted(TrainingSchedule(), lr=1e-3).min_lr == 1e-5


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
