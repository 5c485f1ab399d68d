"""The command line as a user meets it; its commands and options are frozen in test_invariants.py."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import megatron_nemotron3
from megatron_nemotron3 import cli, models
from megatron_nemotron3.cli import table
from megatron_nemotron3.common.parser import OPTIONS, not_installed
from megatron_nemotron3.train.run_checks import require_supported_megatron
from tests.support.invariants import options_of


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "plan nano-4b --gpus 1 --gpu h100 --seq 4096 --gbs 4 --json",
            "--seq-length 4096 --global-batch-size 4",
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


def test_warnings_go_beside_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """They are no part of what a script reads."""
    assert cli.main(["flags", "nano", "--", "--use-checkpoint-args"]) == 0
    warned = capsys.readouterr()
    assert (
        "warning: --use-checkpoint-args: the checkpoint's --spec and architecture replace" in warned.err
        and "warning" not in warned.out
    )
    assert cli.main(["flags", "nano", "--schedule", "published"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["flags", "nano", "--schedule", "none"]) == 0
    assert capsys.readouterr().err == (
        "the options have no --lr and no --train-iters, which a training needs: add them, or --schedule "
        "published\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flags", "supper"], "did you mean 'super'"),
        (["flags", "super", "--precision", "fp8"], "fp8-tensorwise, fp8-blockwise, fp8-delayed)\n"),
        (["flags", "super", "--backend", "cuda"], "invalid choice"),
        (["flags", "super", "--", "lonely"], "lonely"),
        (["show", "super", "--", "--lr", "1"], "no arguments are allowed after --: drop --lr 1"),
        (["nothing"], "unknown command nothing ("),
        (["export", "runs/demo"], "unknown command export; did you mean 'convert to-hf'?"),
        (["boundry"], "unknown command boundry; did you mean 'plan boundary'?"),
        (
            ["plan", "boundry", "--from", "dp=1", "--to", "tp=2"],
            "nemotron3 plan: unknown command boundry; did you mean 'boundary'?",
        ),
        (["report", "watch"], "unknown command watch; did you mean 'report monitors'?"),
        (["prune", "serch", "super"], "unknown command serch; did you mean 'search'?"),
        (["serve"], "did you mean 'convert to-hf' (inference engines serve its folder)?"),
        (["convert", "import"], "unknown command import; did you mean 'convert from-hf'?"),
        (["convert", "x", "y"], "nemotron3 convert: unknown command x ("),
        (["distill"], "nemotron3 distill: the following arguments are required: logits|projection"),
        (["train", "super", "--max-steps", "3"], "unknown option --max-steps; did you mean '--steps'?"),
        (["train", "super", "--resume"], "did you mean '--output' (what its folder has goes on)?"),
        (
            ["flags", "super", "--save-interval", "3"],
            "--save-interval; options of Megatron follow a separate --\n",
        ),
        (["explain", "--argv", "/nowhere.sh"], "explain: /nowhere.sh: No such file or directory\n"),
        (["show", "super", "--max-steps=3"], "unknown option --max-steps\n"),
        (["chat", "--checkpoint", "x"], "did you mean 'CHECKPOINT' (an argument, without an option)?"),
        (["plan", "refit", "super", "--from", "x", "--to", "tp=1"], "nemotron3 plan refit: "),
        (["flag", "super"], "unknown command flag; did you mean 'flags'?"),
        (["convert", "tohf"], "unknown command tohf; did you mean 'to-hf'?"),
        (["plan", "super", "--gpuz=h100", "--gpus", "8"], "unknown option --gpuz; did you mean '--gpu'?"),
        (["run", "--devcie", "cpu", "x.py"], "unknown option --devcie; did you mean '--device'?"),
        (["run", "--change=tokeniser", "x.py", "--lr"], "did you mean 'tokenizer'?"),
        (["run", "--device", "gpu", "x.py"], "choose from auto, cpu, cuda"),
        (["train", "super", "--tiny", "--step", "3"], "unknown option --step; did you mean '--steps'?"),
        (["--verion"], "unknown option --verion; did you mean '--version'?"),
        (["flags", "super", "--backend", "tee"], "did you mean 'te'?"),
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


def test_what_an_argument_may_be_is_no_misspelt_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's name, a file or folder, and an id: the command itself answers."""
    (tmp_path / "serch").mkdir()
    monkeypatch.chdir(tmp_path)
    names = [*models.names(), "serch", "lab/search"]
    for command in [command for command in table.COMMANDS.values() if command.module and command.below]:
        for name in names:
            with pytest.raises(SystemExit):
                cli.main([command.name, name, "--help"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["show", "Super"], ["show", "super"]),
        (
            ["flags", "nano", "--gpu", "H100", "--precision", "FP8_Blockwise"],
            ["flags", "nano", "--gpu", "h100", "--precision", "fp8-blockwise"],
        ),
        (
            ["plan", "nano", "--gpus", "8", "--gpu", "GB200", "--precision", "BF16", "--json"],
            ["plan", "nano", "--gpus", "8", "--gpu", "gb200", "--precision", "bf16", "--json"],
        ),
        (
            ["plan", "boundary", "--from", "dp=1", "--to", "dp=1", "--dtype", "FP32"],
            ["plan", "boundary", "--from", "dp=1", "--to", "dp=1", "--dtype", "float32"],
        ),
    ],
)
def test_choices_in_any_case(words: list[str], same: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for line in (words, same):
        assert cli.main(line) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize("words", [[], ["--help"]])
@pytest.mark.parametrize("columns", [60, 200])
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
    listed = [command for command in table.COMMANDS.values() if " " not in command.name]
    assert len(listed) <= 20
    for command in listed:
        assert any(line.split()[:1] == [command.name] for line in lines), command.name
        assert command.purpose in " ".join(printed.out.split()), command.name
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize("name", ["plan", "distill", "convert"])
def test_the_help_of_a_command_lists_those_below_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, "-h"])
    printed = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "commands:" in printed
    for command in table.COMMANDS[name].below:
        assert command.name.split()[-1] in printed and command.purpose in printed


def test_synonyms_stand_for_what_exists() -> None:
    """A word that names a command needs no synonym."""
    for word, meant in table.SYNONYMS.items():
        assert meant.partition(" (")[0] in table.COMMANDS and word not in table.COMMANDS
    known = {action.dest for name in table.COMMANDS for action in options_of(name)}
    for word, meant in OPTIONS.items():
        assert meant.partition(" (")[0].strip("-").lower().replace("-", "_") in known, word


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


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m megatron_nemotron3 flags super --schedule published | head -1"
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


def test_the_cure_fits_the_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Python 3.12 pip finds no megatron-core, and so not the extra that needs it."""
    assert not_installed("google") == (
        "package protobuf is not installed: pip install 'megatron-nemotron3[train]'"
    )
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["certify", "super", "--tp", "2"]) == 2
    needs = (
        "megatron-core needs Python 3.12, and this is 3.10: make an environment with python3.12, and there"
    )
    cure = "pip install 'megatron-nemotron3[train]'"
    assert capsys.readouterr().err == (f"nemotron3 certify: package torch is not installed: {needs} {cure}\n")
    assert not_installed("megatron.core").startswith("package megatron-core is not installed: megatron-core ")
    assert not_installed("google.protobuf") == "package protobuf is not installed: pip install protobuf"
    assert not_installed("torch", "convert").endswith(": pip install 'megatron-nemotron3[convert]'")


def test_tensorboard_needs_protobuf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it Megatron would write no event files, and train."""
    monkeypatch.setitem(sys.modules, "google", None)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    words = ["train", "super", "--tiny", "--tensorboard", "--output", str(tmp_path / "run")]
    assert cli.main(words) == 2
    assert "--tensorboard: package protobuf is not installed: pip install protobuf" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_megatron_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    train = ["train", "super", "--tiny", "--output", str(tmp_path / "run")]
    for begin in (lambda: cli.main(train), require_supported_megatron):  # the second one is of `run`
        with pytest.raises(SystemExit) as end:
            begin()
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1
        assert "package megatron-core is not installed: pip install 'megatron-nemotron3[train]'" in error
    assert not list(tmp_path.iterdir())
