"""`nemotron3 plan` as a user runs it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import cli

SUPER = ["plan", "super", "--gpus", "128", "--gpu", "h100"]


def test_prints_layouts_memory_time_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(SUPER) == 0
    text = capsys.readouterr().out
    assert "super on 128 h100" in text and "2 is " in text and "slower: " in text
    assert "activations of Mamba" in text and "expert exchange" in text


def test_its_flags_are_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, words in {
        "super": ["--gpus", "128", "--gpu", "h100"],
        "ultra": ["--gpus", "512", "--gpu", "gb300", "--precision", "nvfp4", "--dispatcher", "hybridep"],
        "nano-4b": ["--gpus", "8", "--gpu", "h200", "--seq", "131072", "--gbs", "16"],
    }.items():
        assert cli.main(["plan", name, *words, "--json", "--best", "3"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found["best"]) == 3
        for one in found["best"]:
            command = shlex.split(one["flags"])
            assert command[0] == "nemotron3"
            if "precision.yaml" in command:
                assert cli.main(["precision", name, "--yaml", str(tmp_path / "precision.yaml")]) == 0
                command[command.index("precision.yaml")] = str(tmp_path / "precision.yaml")
            assert cli.main(command[1:]) == 0, capsys.readouterr().err
            capsys.readouterr()


def test_reads_the_options_published_for_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "lightning", "--gpus", "16", "--gpu", "h100", "--gbs", "512", "--json"]

    def answer(*words: str) -> dict[str, Any]:
        assert cli.main([*asked, *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    tuned, plain = answer(), answer("--plain")
    assert tuned["published_options"] == "nemotron_3_5_lightning_pretrain_16gpu_h100_bf16_config"
    assert (tuned["dispatcher"], plain["dispatcher"]) == ("hybridep", "alltoall")
    assert plain["published_options"] is None
    first, other = tuned["best"][0], plain["best"][0]
    assert "--gpu h100" in first["flags"] and "--gpu" not in other["flags"]
    assert first["tokens_per_second_per_gpu"] > 1.2 * other["tokens_per_second_per_gpu"]
    assert answer("--dispatcher", "deepep")["dispatcher"] == "deepep"


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "super", "--gpus", "8", "--gpu", "h100"]) == 1
    text = capsys.readouterr().out
    assert "Nothing fits. The smallest is" in text and "32 GPUs instead of 8" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0", "--gpu", "h100"], "--gpus 0: give 1 to"),
        (
            ["--gpus", "8", "--gpu", "h100", "--precision", "nvfp4"],
            "h100 (compute capability 9.0) has no nvfp4 units",
        ),
        (["--gpus", "8", "--gpu", "h100", "--nvlink-domain", "0"], "--nvlink-domain 0: give 1 or more"),
        (["--gpus", "8", "--gpu", "h100", "--gbs", "-4"], "global_batch_size=-4: give 1 or more"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "super", *words]) == 2
    assert message in capsys.readouterr().err
