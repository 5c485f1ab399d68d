"""A model of one's own from a file, wherever a command takes a model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.models import NANO, SUPER, get, names, tiny
from megatron_nemotron3.models.command import from_json, model

SMALL = {"base": "nano-tiny", "pattern": "MEM*E", "num_moe_experts": 8}


def written(folder: Path, content: object, name: str = "mine.json") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize("name", [*names(), "super-tiny"])
def test_round_trips(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert from_json(get(name).to_json()) == get(name)
    assert cli.main(["show", name, "--json"]) == 0
    assert model(str(written(tmp_path, capsys.readouterr().out))) == get(name)


def test_a_base_and_changes(tmp_path: Path) -> None:
    mine = model(str(written(tmp_path, {"base": "super", "pattern": "ME*E", "hidden_size": 512})))
    assert mine == SUPER.but(
        name="mine",
        title=f"mine, from {SUPER.title}",
        pattern="ME*E",
        hidden_size=512,
        published_total=None,
        published_active=None,
        source="a file, from super",
    )


def test_the_same_model_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path, SMALL))
    commands = (
        ["show", "--model", file, "--json"],
        ["show", file],
        ["flags", "--model", file],
        ["explain", "--model", file, "--full"],
        ["precision", "--model", file],
        ["plan", "--model", file, "--gpus", "1", "--gpu", "h100"],
    )
    for words in commands:
        assert cli.main(words) == 0, words
        assert "MEM*E" in capsys.readouterr().out or words[0] in ("precision", "plan")
    wrong = written(tmp_path, SMALL | {"patern": "M"}, "wrong.json")
    readers = (
        ["train", "--model", str(wrong), "--steps", "1"],
        ["convert", "to-hf", "a", "b", "--model", str(wrong)],
        ["convert", "verify", "a", "b", "--model", str(wrong)],
        ["generate", str(tmp_path), "--model", str(wrong), "--prompt", "x"],
        ["doctor", "--step", str(wrong)],
    )
    for words in readers:
        assert cli.main(words) == 2, words
        assert "unknown field \"patern\"; did you mean 'pattern'?" in capsys.readouterr().err or words[0] in (
            "generate",
        )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"base": "nano",}', "line 1, column 17"),
        ("[1]", "give an object of fields"),
        ("{}", "pattern, hidden_size, "),
        ({"base": "nan"}, "did you mean 'nano'?"),
        ({"base": "nano", "hiddensize": 1}, "unknown field \"hiddensize\"; did you mean 'hidden_size'?"),
        ({"base": "nano", "moe-latent-size": 1}, "did you mean 'moe_latent_size'?"),
        ({"base": "nano", "num_layers": 3}, '"num_layers" follows from other fields'),
        ('{"base": "nano", "hidden_size": 1, "hidden_size": 2}', '"hidden_size" is given twice'),
        ({"base": "nano", "hidden_size": "64"}, "hidden_size='64' is not an integer"),
        ({"base": "nano", "hidden_size": 64.0}, "hidden_size=64.0 is not an integer"),
        ({"base": "nano", "hidden_size": True}, "hidden_size=True is not an integer"),
        ({"base": "nano", "hidden_size": 0}, "hidden_size=0: give a positive number"),
        ({"base": "nano", "mtp_num_layers": -1}, "mtp_num_layers=-1: give a positive number or 0"),
        ('{"base": "nano", "init_method_std": NaN}', "init_method_std=nan: give a positive number or 0"),
        ({"base": "nano", "hidden_size": None}, "hidden_size=None is not an integer"),
        (
            {"base": "nano", "mamba_conv_kernel": 8},
            "mamba_conv_kernel=8: Megatron builds Mamba-2 with 4 only",
        ),
        ({"base": "nano", "name": "../out"}, "becomes a folder's"),
        ({"base": "nano", "name": "super"}, 'name "super" is that of Nemotron 3 Super'),
        ({"base": "nano", "name": "super-tiny"}, 'name "super-tiny" is that of'),
        ({"model_type": "nemotron_h"}, "config.json of a Hugging Face folder"),
        ({"config": vars(NANO), "num_layers": 3}, '"num_layers" does not follow from "config"'),
        ({"config": vars(NANO) | {"patern": "M"}}, 'unknown field "patern"'),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_a_file_says_wrong(
    content: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, content)
    assert cli.main(["show", "--model", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nemotron3 show: {file}: ") and said in error and error.count("\n") == 1


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name in ("pipe", "folder", "zero", "bytes", "missing"):
        assert cli.main(["show", "--model", str(tmp_path / f"{name}.json")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_one_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "nano", "--model", "super"]) == 2
    assert "NAME nano and --model super both name a model: give one" in capsys.readouterr().err
    assert cli.main(["show"]) == 2
    assert "give the NAME of a model (nano, " in capsys.readouterr().err
    assert cli.main(["show", "--model", "super", "--tiny"]) == 0
    assert tiny(SUPER).title in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mine.py", "MINE.PY"])
def test_a_program_is_no_model_and_is_not_run(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text("raise SystemExit(7)")
    for text in (str(file), name):  # there, and missing
        with pytest.raises(ValueError, match="Nemotron3Config.to_json writes it"):
            model(text)
