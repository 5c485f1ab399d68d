"""What flags() composes: sections, extras, precision, and the values a launch depends on."""

from __future__ import annotations

import megatron_nemotron3.launch
from megatron_nemotron3 import models
from megatron_nemotron3.launch import (
    Flag,
    Launch,
    ParallelLayout,
    TrainingData,
    TrainingSchedule,
    flags,
    mock_data,
    published,
    smoke,
    to_argv,
)
from megatron_nemotron3.launch.flag import SECTIONS


def named(result: list[Flag]) -> dict[str, tuple[str, ...]]:
    return {flag.name: flag.values for flag in result}


def test_sections_in_order_and_no_option_twice() -> None:
    tiny = models.get("ultra-tiny")
    launch = Launch.of(
        tiny,
        backend="te",
        gpu="gb200",
        schedule=smoke(tiny),
        data=mock_data(tiny, save="/x"),
        extra=("--seed", "1"),
    )
    result = flags(launch)
    order = [SECTIONS.index(flag.section) for flag in result]
    assert order == sorted(order)
    assert set(order) == set(range(len(SECTIONS)))
    assert len(named(result)) == len(result)


def test_origin_names_a_field_that_holds_the_value() -> None:
    config = models.ULTRA
    for flag in flags(Launch.of(config, schedule=published(config))):
        if flag.origin.startswith("config.") and "," not in flag.origin:
            value = getattr(config, flag.origin.removeprefix("config."))
            assert flag.values in ((), (str(value),)), flag


def test_extra_replaces_and_goes_last() -> None:
    result = flags(Launch.of(models.NANO, extra=("--moe-token-dispatcher-type", "flex", "--log-interval=7")))
    assert [flag.name for flag in result[-2:]] == ["--moe-token-dispatcher-type", "--log-interval"]
    assert to_argv(result)[-4:] == ["--moe-token-dispatcher-type", "flex", "--log-interval", "7"]
    assert len(named(result)) == len(result)


def test_distributed_optimizer() -> None:
    """Also at dp=1: its checkpoints do not load into the plain optimizer."""
    for backend in megatron_nemotron3.launch.BACKENDS:
        assert "--use-distributed-optimizer" in named(
            flags(Launch.of(models.NANO, ParallelLayout(), backend=backend))
        )
    off = named(flags(Launch.of(models.NANO, backend="te", distributed_optimizer=False)))
    assert not {"--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"} & set(off)


def test_data_flags() -> None:
    assert [flag.name for flag in flags(Launch.of(models.NANO)) if flag.section == "data"] == []
    data = TrainingData(data_path=("1", "a"), split="99,1,0", tokenizer_type="HuggingFaceTokenizer", save="s")
    ours = named(flags(Launch.of(models.NANO, data=data, schedule=TrainingSchedule(save_interval=7))))
    assert ours["--data-path"] == ("1", "a")
    assert ours["--save"] == ("s",)
    assert ours["--save-interval"] == ("7",)
    assert "--mock-data" not in ours
    assert named(flags(Launch.of(models.NANO, data=mock_data(models.NANO))))["--mock-data"] == ()
