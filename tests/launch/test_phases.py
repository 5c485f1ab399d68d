"""The phases after pre-training: what the reports state of them, and what a launch must add."""

from __future__ import annotations

import pytest

from megatron_nemotron3 import cli, models
from megatron_nemotron3.launch import Launch, ParallelLayout, adjusted, check, published
from megatron_nemotron3.launch.phases import BF16_END, PHASES, Phase, phase, require_known, switch_step


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


def test_fine_tuning_with_mtp_takes_nvidias_cp() -> None:
    """NVIDIA's configuration of Ultra has CP 8; the stack's hooks weigh MTP's loss right there."""
    found = phase(models.ULTRA, "sft")
    layout = ParallelLayout(tp=2, pp=6, cp=8, ep=32, dp=2)
    violations = check(
        Launch.of(
            models.ULTRA, layout, precision="bf16", backend="te", schedule=found.schedule, extra=found.options
        )
    )
    assert violations == []


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


def test_the_end_of_a_run_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    """The published schedule to the letter, and the step where appendix D's 8.2T of 10T lie in it."""
    found = phase(models.SUPER, BF16_END)
    assert found.schedule == published(models.SUPER) and found.precision == "bf16"
    assert switch_step(found.schedule) == round(0.82 * -(-3_051_757_813 // 3072)) == 814_597
    words = ["flags", "super", "--tiny", "--backend", "torch", "--steps", "100", "--global-batch-size", "4"]
    assert cli.main([*words, "--lr", "1e-3", "--schedule", BF16_END]) == 0
    said = capsys.readouterr()
    assert "--exit-interval 82" in said.err and "--change precision" in said.err
    assert "--train-iters 100" in said.out and "--lr-wsd-decay-iters 20" in said.out
    assert cli.main([*words, "--lr", "1e-3", "--schedule", "published"]) == 0
    assert capsys.readouterr().out == said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tiny"], "the last part of a run of known length: give --steps"),
        (["--tiny", "--steps", "1"], "a run of 1 steps has no last part"),
        (["--precision", "mxfp8", "--backend", "te"], "bf16-end is in bf16: drop --precision mxfp8"),
    ],
)
def test_no_end_in_bf16(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flags", "super", "--schedule", BF16_END, *words]) == 2
    assert message in capsys.readouterr().err
