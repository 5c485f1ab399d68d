"""The phases after pre-training: what the reports state of them, and what a launch must add."""

from __future__ import annotations

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.args import Launch, ParallelLayout, adjusted, check, published
from megatron_nemotron3.args.phases import PHASES, Phase, phase, require_known


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
