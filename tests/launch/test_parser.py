"""Options after `--` that Megatron's parser would refuse, or that would compute something else."""

from __future__ import annotations

import pytest

from megatron_nemotron3 import cli, models
from megatron_nemotron3.cli import main
from megatron_nemotron3.launch import Launch, check, versions
from megatron_nemotron3.launch.flag import parse, repeated
from megatron_nemotron3.launch.parser import (
    default,
    is_default,
    misused,
    nearest,
    unknown,
)


@pytest.mark.parametrize("version", versions.KNOWN)
@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("lrr", "--lr"),
        ("LR", "--lr"),
        ("bf17", "--bf16"),
        ("micro_batch_size", "--micro-batch-size"),
        ("recompute-granularty", "--recompute-granularity"),
        ("tensor-model-parallel", "--tensor-model-parallel-size"),
        ("moe-router-top-k", "--moe-router-topk"),
        ("train-steps", "--train-iters"),
    ],
)
def test_the_nearest_name(word: str, meant: str, version: str) -> None:
    assert meant in nearest(word, version)
    (said,) = unknown([f"--{word}", "--lr", "--export-quant-cfg"], version)
    assert said.startswith(f"--{word} (did you mean ") and meant in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"--aaa{i}" for i in range(5000)], "--aaa18, --aaa19, and 4,980 more: correct or drop it"),
        (["--lr", "x"] * 300, "--lr x: give a number; and 280 more [option-value"),
        (["--lr", *map(str, range(5000))], "--lr takes one value, but is given 5000: 0 1 2 "),
    ],
    ids=["unknown options", "wrong values", "many values"],
)
def test_a_message_names_the_first_of_many(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flags", "super", "--tiny", "--", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err) < 1000


def test_defaults() -> None:
    assert default("--clip-grad", {}) == "1.0" and default("--tensorboard-dir", {}) is None
    fp8 = {"--fp8-format": ("hybrid",)}
    assert (default("--fp8-recipe", fp8), default("--fp8-recipe", {})) == ("delayed", None)
    assert default("--kv-channels", {"--hidden-size": ("512",), "--num-attention-heads": ("4",)}) == "128"
    assert is_default("--clip-grad", {"--clip-grad": ("1.0",)})
    assert not is_default("--clip-grad", {"--clip-grad": ("0.5",)})
    # It refines what is off; where it is on, what it says counts.
    assert is_default("--fp8-recipe", {"--fp8-recipe": ("mxfp8",)})
    assert not is_default("--fp8-recipe", {"--fp8-recipe": ("delayed",), **fp8})
    assert not is_default("--seed", {"--seed": ("1234",)})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr 1e-4x", "--lr 1e-4x: give a number"),
        ("--lr nan", "--lr nan: give a finite number"),
        ("--clip-grad=inf", "--clip-grad inf: give a finite number"),
        ("--seed 1.5", "--seed 1.5: give an integer"),
        ("--seed", "--seed needs a value"),
        ("--lr 1 2", "--lr takes one value, but is given 2: 1 2"),
        ("--bf16 true", "--bf16 takes no value, but is given true"),
        ("--bf16=1", "--bf16 takes no value, but is given 1"),
        ("--rampup-batch-size 1 2", "--rampup-batch-size takes 3 values, but is given 2: 1 2"),
        ("--recompute-granularity none", "--recompute-granularity none: choose full, selective"),
        ("--onnx-safe False", "--onnx-safe False: the parser reads any word as true; drop the option"),
        ("--recompute-modules", "--recompute-modules needs a value"),
    ],
)
def test_a_value_that_the_parser_refuses(words: str, said: str) -> None:
    assert misused(parse(words.split()), "0.19") == [said]


@pytest.mark.parametrize(
    "words",
    ["--seed -1", "--lr 1e-4 --bf16", "--data-path", "--spec a b", "--rampup-batch-size 1 2 3", "--save a,b"],
)
def test_values_that_the_parser_takes(words: str) -> None:
    assert misused(parse(words.split()), "0.19") == []


def test_other_rules_wait_for_values_that_can_be_read() -> None:
    extra = ["--num-layers-at-end-in-bf16", "some"]
    found = check(Launch.of("super", precision="nvfp4", extra=extra, te_precision_config_file="x"))
    assert [violation.rule for violation in found] == ["option-value"]


def test_another_model_than_the_named_one_is_said() -> None:
    def rules(*extra: str) -> list[str]:
        return [v.message for v in check(Launch.of(models.NANO, extra=extra)) if v.rule == "model-option"]

    (said,) = rules("--num-experts", "64", "--lr", "1")
    assert said.startswith("--num-experts 64 replaces config.num_moe_experts=128: ")
    assert rules("--num-experts", "128", "--moe-aux-loss-coeff", "0", "--init-method-std", "0.1") == []


def test_the_last_of_several_values_is_said() -> None:
    (said,) = repeated(parse(["--lr", "1", "--seed", "3", "--lr", "2", "--seed", "3"]))
    assert said == "--lr is given 2 times with different values: the last one counts, --lr 2"


@pytest.mark.parametrize("command", [["explain", "nano"], ["train", "nano", "--tiny"]])
def test_commands_refuse_unknown_options(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    output = ["--output", f"{tmp_path}/run", "--device", "cpu"] if command[0] == "train" else []
    assert cli.main([*command, *output, "--", "--lrr", "1e-4"]) == 2
    printed = capsys.readouterr()
    assert "--lrr (did you mean --lr" in printed.err and printed.out == ""


@pytest.mark.parametrize("words", [["--save", "/x"], ["--train-iters", "7"], ["--data-path", "a"]])
def test_train_refuses_what_its_own_options_set(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    run = ["train", "nano", "--tiny", "--device", "cpu", "--output", f"{tmp_path}/run", "--", *words]
    assert cli.main(run) == 2
    assert f"replace what train itself sets: {words[0]} (give --" in capsys.readouterr().err


def test_flags_say_what_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flags", "nano", "--", "--num-experts", "64", "--lr", "1", "--lr", "2"]) == 0
    printed = capsys.readouterr()
    assert "--num-experts 64 replaces config.num_moe_experts=128" in printed.err
    assert "warning: --lr is given 2 times with different values: the last one counts, --lr 2" in printed.err
    assert "--num-experts 64" in printed.out and "warning" not in printed.out
