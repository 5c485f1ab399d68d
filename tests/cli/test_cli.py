"""The command line is frozen: changing an option is a decision, not an accident."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import megatron_nemotron3
from megatron_nemotron3 import cli
from megatron_nemotron3.cli import table

RUN = {
    "--tp", "--pp", "--vpp", "--ep", "--etp", "--cp", "--dp", "--steps", "--seq-length", "--micro-batch-size",
    "--global-batch-size", "--lr", "--precision", "--backend",
}  # fmt: skip
COMMANDS = {
    "show": {"--model", "--tiny", "--json"},
    "flags": {
        "--model", "--tiny", "--shell",
        "--te-precision-config-file", "--schedule", "--emulate", "--megatron-core",
        "--gpu", "--without", "--environment", "--json",
    }
    | RUN,
    "explain": {
        "--model", "--tiny", "--argv",
        "--all", "--full", "--set", "--trust-script", "--json", "--te-precision-config-file", "--schedule",
        "--emulate", "--gpu", "--without",
    }
    | RUN,
    "certify": {
        "--model", "--tiny", "--set", "--trust-script", "--ranks", "--gpus", "--output", "--check", "--json",
        "--te-precision-config-file", "--schedule", "--emulate", "--gpu", "--without",
    }
    | RUN,
    "run": {
        "--trust-checkpoint",
        "--device", "--monitor", "--nemotron3-emulate", "--change", "--nemotron3-teacher",
        "--nemotron3-distill",
    },
    "logits": {
        "--trust-checkpoint",
        "--output", "--samples", "--topk", "--logit-temperature", "--data-path", "--split", "--conversations",
        "--tokenizer", "--seq-length", "--data-seed", "--tp", "--pp", "--cp", "--ep", "--etp", "--dp",
        "--micro-batch-size", "--device",
    },
    "finetune": {
        "--mtp-from", "--mtp-num-layers",
        "--conversations", "--held-out", "--output", "--tokenizer", "--chat-template", "--lora",
        "--adapter-only", "--steps", "--lr", "--seq-length", "--device",
    },
    "boost": {
        "--trust-checkpoint",
        "--output", "--model", "--tiny", "--depths", "--loss", "--loss-temperature", "--mix", "--decay",
        "--grow", "--text", "--data-path", "--tokenizer", "--device", "--emulate",
        "--te-precision-config-file",
    }
    | RUN,
    "report": {"--output", "--json"},
    "chat": {
        "--tokenizer", "--device", "--dtype", "--system", "--max-new-tokens", "--temperature", "--top-p",
        "--top-k", "--seed", "--draft", "--model", "--tiny",
    },
    "watch": {"--output", "--json"},
    "boundary": {
        "--from", "--to", "--rows", "--samples", "--rows-per-sample", "--seq-length", "--hidden", "--dtype",
        "--backward", "--lines", "--json",
    },
    "refit": {
        "--model", "--tiny", "--from", "--to", "--engine", "--dtype", "--colocated", "--buffer",
        "--delta", "--quantize", "--input-scales", "--json",
    },
    "bisect": {
        "--checkpoint", "--trainer", "--engine", "--previous", "--first", "--model", "--tiny", "--json",
    },
    "search": {
        "--model", "--tiny", "--budget", "--vary", "--scores", "--gpu", "--sequences", "--context",
        "--best", "--output", "--json",
    },
    "plan": {
        "--model", "--tiny", "--gpus", "--gpu", "--nvlink-domain", "--seq-length", "--seq",
        "--global-batch-size", "--gbs", "--precision", "--dispatcher", "--plain",
        "--best", "--json",
    },
    "recipe": {"--output", "--json"},
    "check": {"--full", "--workers", "--json"},
    "doctor": {"--step", "--json"},
    "precision": {
        "--model", "--tiny", "--format", "--precision", "--output", "--yaml", "--report",
        "--te-precision-config-file", "--json",
    },
    "convert": set(),
    "verify": {
        "--vocab-size", "--dequantize", "--model", "--tiny", "--allow-unused", "--workers", "--lora-alpha",
        "--json", "--mtp-num-layers", "--mtp-from",
    },
    "prune": {
        "--model", "--tiny", "--text", "--data-path", "--scores", "--tokenizer", "--sample-tokens",
        "--seq-length", "--tp", "--pp", "--ep", "--etp", "--precision", "--device", "--sizes", "--output",
        "--dry-run", "--workers", "--json",
    },
    "generate": {
        "--checkpoint", "--tokenizer", "--device", "--dtype", "--model", "--tiny", "--prompt",
        "--prompt-file", "--max-new-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--draft",
        "--stop", "--json", "--no-stream", "--chat", "--image", "--audio", "--video",
    },
    "evaluate": {
        "--checkpoint", "--tokenizer", "--device", "--dtype", "--model", "--tiny", "--text", "--data-path",
        "--conversations", "--tokens", "--seq-length", "--draft", "--json",
    },
    "xtoken": {
        "--output", "--projection", "--width", "--pieces", "--no-joined", "--json",
    },
    "train": {
        "--trust-checkpoint",
        "--model", "--tiny", "--device",
        "--output", "--text", "--max-bytes", "--data-path", "--tokenizer", "--monitor",
        "--verbose", "--emulate", "--te-precision-config-file", "--log-precision",
        "--change", "--conversations", "--pretrained", "--mean", "--teacher", "--distill",
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


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from _parsers(below)
    yield parser


#: Options that write, whose kind of file differs.
WRITES = {"--output": "where to write"}


def test_an_option_means_the_same_in_every_command() -> None:
    """Same name: the same kind of value, placeholder and first words of the help, up to a bracket or stop."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for parser in _parsers(cli.parser()):
        for action in parser._actions:
            if not action.option_strings or action.help == argparse.SUPPRESS:
                continue
            name = action.option_strings[-1]
            assert action.help, f"{parser.prog} {name}"
            if (parser.prog, name) == ("nemotron3 bisect", "--engine"):
                continue  # the engine's file, beside the trainer's; `refit` takes the engine's name
            if name in WRITES:
                assert action.type is Path and action.help.startswith(WRITES[name]), parser.prog
                continue
            kind = "text" if action.type in (None, Path) else action.type
            stem = re.split(r"[:;(,]", action.help)[0].strip()
            found.setdefault(name, set()).add((kind, action.nargs == 0, action.metavar, stem))
    assert {name: meanings for name, meanings in found.items() if len(meanings) > 1} == {}


def test_many_options_are_in_groups() -> None:
    for parser in _parsers(cli.parser()):
        groups = [
            [one for one in group._group_actions if one.option_strings and one.help != argparse.SUPPRESS]
            for group in parser._action_groups
        ]
        if sum(map(len, groups)) > 10:
            assert sum(map(bool, groups)) >= 2, parser.prog
            usage = parser.format_help().partition("\n\n")[0]
            assert len(usage) < 110 and "[OPTION ...]" in usage, usage


@pytest.mark.parametrize("name", [*table.COMMANDS, "convert to-hf", "convert from-hf"])
def test_help_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A purpose in one sentence, and an example at the end."""
    with pytest.raises(SystemExit, match="0"):
        cli.main([*name.split(), "-h"])
    out = capsys.readouterr().out
    purpose, example = out.split("\n\n")[1], out.splitlines()[-1]
    assert purpose[0].isupper() and purpose.rstrip().endswith("."), purpose
    assert out.splitlines()[-2] == "example:" and example.startswith(f"  nemotron3 {name}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "plan nano --gpus 8 --gpu h100 --seq 4096 --gbs 64 --json",
            "--seq-length 4096 --global-batch-size 64",
        ),
        ("precision super --format mxfp8", "--precision mxfp8"),
    ],
)
def test_earlier_spellings(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They work, and no help shows them."""
    words = old.split()
    outputs = []
    start = next(i for i, word in enumerate(words) if word in ("--seq", "--format"))
    rest = [word for word in words[start:] if word == "--json"]
    for line in (words, [*words[:start], *new.split(), *rest]):
        assert cli.main(line) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""
    with pytest.raises(SystemExit):
        cli.main([words[0], "-h"])
    assert f"{words[start]} " not in capsys.readouterr().out


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
        (["nothing"], "unknown command nothing"),
        (["flag", "super"], "unknown command flag; did you mean 'flags'?"),
        (["convert", "tohf"], "unknown command tohf; did you mean 'to-hf'?"),
        (["flags", "super", "--backnd", "te"], "unknown option --backnd; did you mean '--backend'?"),
        (["plan", "super", "--gpuz=h100", "--gpus", "8"], "unknown option --gpuz; did you mean '--gpu'?"),
        (["run", "--devcie", "cpu", "x.py"], "unknown option --devcie; did you mean '--device'?"),
        (["run", "--change=tokeniser", "x.py", "--lr"], "did you mean 'tokenizer'?"),
        (["run", "--device", "gpu", "x.py"], "choose from auto, cpu, cuda"),
        (["run", "--device", "cpu"], "required: SCRIPT"),
        (["--verion"], "unknown option --verion; did you mean '--version'?"),
        (["flags", "super", "--backend", "tee"], "did you mean 'te'?"),
        (["flags", "super", "--precision", "nvpf4"], "did you mean 'nvfp4'?"),
        (["show", "super", "nano"], "unexpected argument nano"),
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
    assert printed.err.count("\n") <= 2


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["show", "Super"], ["show", "super"]),
        (["flags", "NANO", "--backend", "TE"], ["flags", "nano", "--backend", "te"]),
        (
            ["flags", "nano", "--gpu", "H100", "--precision", "FP8_Blockwise"],
            ["flags", "nano", "--gpu", "h100", "--precision", "fp8-blockwise"],
        ),
        (
            ["plan", "nano", "--gpus", "8", "--gpu", "GB200", "--precision", "BF16", "--json"],
            ["plan", "nano", "--gpus", "8", "--gpu", "gb200", "--precision", "bf16", "--json"],
        ),
        (["precision", "super", "--precision", "NVFP4"], ["precision", "super", "--precision", "nvfp4"]),
        (
            ["boundary", "--from", "dp=1", "--to", "dp=1", "--dtype", "BF16"],
            ["boundary", "--from", "dp=1", "--to", "dp=1", "--dtype", "bf16"],
        ),
        (
            ["boundary", "--from", "dp=1", "--to", "dp=1", "--dtype", "FP32"],
            ["boundary", "--from", "dp=1", "--to", "dp=1", "--dtype", "float32"],
        ),
    ],
)
def test_choices_in_any_case(words: list[str], same: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for line in (words, same):
        assert cli.main(line) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_help_lists_every_command(
    words: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    try:
        assert cli.main(words) == 0
    except SystemExit as end:
        assert end.code == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == ""
    for command in table.COMMANDS.values():
        assert any(line.split()[:1] == [command.name] for line in lines), command.name
        assert command.purpose in " ".join(printed.out.split()), command.name
    assert max(map(len, lines)) <= columns


def test_help_and_version_import_no_command() -> None:
    """They answer at once: of this package they import `cli` and `common`."""
    code = (
        "import sys; from megatron_nemotron3 import cli; cli.main({words}); "
        "print(*sorted({{m.split('.')[1] for m in sys.modules if m.startswith('megatron_nemotron3.')}}), "
        "*[m for m in ('torch', 'numpy', 'megatron.core') if m in sys.modules])"
    )
    for words in ("[]", "['--version']"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(words=words)], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "cli common"
    done = subprocess.run(
        [sys.executable, "-c", code.format(words="['show', 'nano']")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"args", "plan", "train"} & set(done.stdout.splitlines()[-1].split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert found["nemotron3"] == megatron_nemotron3.__version__
    assert found["torch"] == metadata.version("torch")
    assert found["megatron-core"] == metadata.version("megatron-core")


def test_every_command_has_a_purpose_and_an_example() -> None:
    for command in table.COMMANDS.values():
        assert command.purpose[0].islower() and not command.purpose.endswith("."), command.name
        assert command.example.startswith(f"nemotron3 {command.name}"), command.name


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
