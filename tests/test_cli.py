"""The command line is frozen: changing an option is a decision, not an accident."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_nemotron3 import cli

RUN = {
    "--tp", "--pp", "--vpp", "--ep", "--etp", "--cp", "--dp", "--steps", "--seq-length", "--micro-batch-size",
    "--global-batch-size", "--lr", "--precision", "--backend",
}  # fmt: skip
COMMANDS = {
    "show": {"--model", "--tiny", "--json"},
    "flags": {
        "--model", "--tiny", "--shell",
        "--te-precision-config-file", "--schedule", "--emulate", "--megatron-core",
        "--gpu", "--without", "--environment",
    }
    | RUN,
    "explain": {
        "--model", "--tiny", "--argv",
        "--all", "--full", "--set", "--json", "--te-precision-config-file", "--schedule", "--emulate",
        "--gpu", "--without",
    }
    | RUN,
    "run": set(),
    "watch": {"--output"},
    "boundary": {
        "--from", "--to", "--rows", "--samples", "--rows-per-sample", "--seq-length", "--hidden", "--dtype",
        "--backward", "--lines", "--json", "--plot",
    },
    "plan": {
        "--model", "--tiny", "--gpus", "--gpu", "--nvlink-domain", "--seq-length", "--seq",
        "--global-batch-size", "--gbs", "--precision", "--dispatcher", "--plain",
        "--best", "--json", "--plot",
    },
    "recipe": {"--output", "--json"},
    "check": {"--full", "--workers"},
    "doctor": {"--kernels", "--step", "--json"},
    "precision": {
        "--model", "--tiny", "--format", "--precision", "--output", "--yaml", "--report",
        "--te-precision-config-file",
    },
    "convert": set(),
    "verify": {
        "--vocab-size", "--dequantize", "--model", "--tiny", "--allow-unused", "--workers", "--lora-alpha",
    },
    "generate": {
        "--checkpoint", "--tokenizer", "--device", "--dtype", "--model", "--tiny", "--prompt",
        "--prompt-file", "--max-new-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--draft",
        "--stop", "--json", "--no-stream",
    },
    "evaluate": {
        "--checkpoint", "--tokenizer", "--device", "--dtype", "--model", "--tiny", "--text", "--data-path",
        "--conversations", "--tokens", "--seq-length", "--draft", "--plot", "--json",
    },
    "train": {
        "--model", "--tiny", "--device",
        "--output", "--text", "--max-bytes", "--data-path", "--tokenizer", "--monitor",
        "--verbose", "--emulate", "--te-precision-config-file", "--log-precision", "--more-steps",
        "--change", "--conversations", "--pretrained", "--mean",
    }
    | RUN,
}  # fmt: skip


def test_commands_and_options() -> None:
    subparsers = next(a for a in cli.parser()._actions if a.dest == "command")
    found = {
        name: {o for a in p._actions for o in a.option_strings} - {"-h", "--help"}
        for name, p in subparsers.choices.items()  # type: ignore[union-attr]
    }
    assert found == COMMANDS


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "super", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert "123611033088" in json.dumps(numbers)
    assert cli.main(["show", "super", "--tiny"]) == 0
    assert "3,033,328" in capsys.readouterr().out


def test_extra_options_go_to_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flags", "nano", "--", "--log-interval", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("--log-interval 7") == 1 and "--log-interval 10" not in lines


def test_warnings_go_beside_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """They are no part of what a script reads."""
    assert cli.main(["flags", "nano", "--", "--use-checkpoint-args"]) == 0
    warned = capsys.readouterr()
    assert (
        "warning: --use-checkpoint-args: the checkpoint's --spec and architecture replace" in warned.err
        and "warning" not in warned.out
    )
    assert cli.main(["flags", "nano", "--schedule", "none"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flags", "supper"], "did you mean 'super'"),
        (["flags", "super", "--tp", "0"], "tp=0 is not a positive integer"),
        (["flags", "super", "--precision", "nvfp4", "--backend", "te"], "--te-precision-config-file"),
        (["flags", "super", "--backend", "cuda"], "invalid choice"),
        (["flags", "super", "--", "lonely"], "lonely"),
        (["show", "super", "--", "--lr", "1"], "no arguments are allowed after --: drop --lr 1"),
        (["nothing"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    assert message in printed.err and "Traceback" not in printed.err


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m megatron_nemotron3 flags super --schedule none | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout and done.stderr == ""


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "super", "--tiny"])
    assert end.value.code == 2
    assert "package torch is not installed" in capsys.readouterr().err
