"""Every command that is told of a bad precision file says what is wrong (all cases: `test_yaml`)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megatron_nemotron3 as n3
from megatron_nemotron3 import cli, models
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.run import main as launch

from .test_yaml import REST

GOOD = yaml_file.render(models.tiny(models.get("super")))
CASES = {
    "": "empty, so not a mapping .*nemotron3 precision (NAME|super-tiny) --output FILE writes",
    GOOD.replace('config: "bf16"', 'config: "bf61"'): "'bf61' is none of .*did you mean 'bf16'",
    GOOD + "  more:\n": "matchers.more: None is not a mapping",
    # Not wrong by itself: the launcher of a script sees it when the model is built.
    GOOD + REST: "none of the model's .* linears is nvfp4",
}
FLAGS = ["super", "--tiny", "--precision", "nvfp4"]
EMULATE = [*FLAGS, "--backend", "torch", "--emulate"]


def command(*words: str) -> Callable[[str], int | None]:
    return lambda file: cli.main([*words, "--te-precision-config-file", file])


def run(file: str) -> int | None:
    launch(["--device", "cpu", __file__, "--te-precision-config-file", file])
    return 0


def build(file: str) -> int | None:
    """Exit status 2 stands for a ValueError, whose message goes where a command prints it."""
    settings = {"tiny": True, "precision": "nvfp4", "backend": "torch", "emulate": True}
    try:
        with n3.cpu_mode():
            n3.build_model("super", te_precision_config_file=file, **settings)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


COMMANDS: dict[str, Callable[[str], int | None]] = {
    "flags": command("flags", *FLAGS, "--backend", "te"),
    "flags --emulate": command("flags", *EMULATE),
    "flags, as an extra": command("flags", *FLAGS, "--backend", "te", "--"),
    "flags in bf16": command("flags", "super", "--tiny", "--backend", "te", "--"),
    "explain": command("explain", *FLAGS, "--backend", "te"),
    "train": command("train", *EMULATE, "--device", "cpu"),
    "precision": command("precision", "super", "--tiny"),
    "run": run,
    "build_model": build,
}


def status_of(name: str, place: str) -> int | None:
    try:
        return COMMANDS[name](place)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_is_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each mistake, exit status 2, and nothing written."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bad.yaml"
    for text, message in CASES.items():
        if text == GOOD + REST and name in ("run", "flags in bf16"):
            continue
        file.write_text(text)
        status = status_of(name, str(file))
        said = capsys.readouterr()
        assert status == 2, (message, said)
        assert re.search(message, said.err), (message, said.err)
        assert "Traceback" not in said.err and len(said.err.splitlines()) < 10, said.err
        assert os.listdir(tmp_path) == ["bad.yaml"], message


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe without a writer, a device without an end and a folder: refused at once."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    places = {tmp_path / "pipe": "a pipe", Path("/dev/zero"): "a character device"}
    for place, message in (places | {tmp_path / "folder": "[Ff]older|directory"}).items():
        try:
            status = status_of(name, str(place))
        except OSError as problem:  # from Python
            assert name == "build_model" and re.search(message, str(problem))
            continue
        assert status == 2 and re.search(message, capsys.readouterr().err)
