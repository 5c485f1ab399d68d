"""`--precision nvfp4 --emulate` from the command line to Megatron's own training loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision.settings import OPTION
from megatron_nemotron3.train import log

FLAGS = ["flags", "super", "--tiny", "--precision", "nvfp4", "--te-precision-config-file", "file.yaml"]


def test_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main([*FLAGS, "--backend", "torch", "--emulate"]) == 0
    found = capsys.readouterr()
    lines = found.out.splitlines()
    assert "--bf16" in lines and "--te-precision-config-file file.yaml" in lines
    assert "--num-layers-at-end-in-bf16 2" in lines and "--fp4-format e2m1" not in lines
    assert lines[-1] == f"{OPTION} nvfp4"
    assert f"set {EMULATE}=nvfp4 in the training processes" in found.err
    monkeypatch.setenv(EMULATE, "nvfp4,sr=0")
    assert cli.main([*FLAGS, "--backend", "torch", "--emulate"]) == 0
    assert f"set {EMULATE}=nvfp4,sr=0 in" in capsys.readouterr().err


def test_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torch, train = [*FLAGS, "--backend", "torch"], ["train", "super", "--tiny", "--device", "cpu"]
    fp8 = ["flags", "nano", "--tiny", "--precision", "fp8-tensorwise", "--backend", "torch", "--emulate"]
    for value, words, message in (
        (None, torch, "use backend te, or --emulate"),
        ("mxfp8", [*torch, "--emulate"], "asks for nvfp4 on backend torch and emulates mxfp8: use precision"),
        (None, fp8, "asks for fp8-tensorwise on backend torch and emulates nvfp4"),
        ("nvfp4", FLAGS, "is set: pass --precision nvfp4 --emulate or unset it"),
        ("nvfp4", train, "pass --precision nvfp4 --emulate"),
        (None, [*train, "--precision", "bf16", "--emulate"], "emulation supports only precision nvfp4 and"),
    ):
        monkeypatch.delenv(EMULATE, raising=False)
        if value is not None:
            monkeypatch.setenv(EMULATE, value)
        assert cli.main(words) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def train(output: Path, text: Path, *extra: str) -> log.Curve:
    """Six steps of tiny Super; goes on where a run in the same folder stopped."""
    words = ["train", "super", "--tiny", "--device", "cpu", "--precision", "nvfp4", "--emulate"]
    words += ["--steps", "6", "--seq-length", "64", "--micro-batch-size", "1", "--global-batch-size", "2"]
    words += ["--text", str(text), "--output", str(output), "--", "--eval-iters", "0", "--log-interval", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_nemotron3", *words, *extra],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "emulating nvfp4: linears of this rank: 4 mxfp8, 20 nvfp4" in done.stdout
    return log.read(str(output / "train.log"))


@pytest.mark.full
def test_trains_and_resumes(tmp_path: Path) -> None:
    """The draws of stochastic rounding are in the checkpoint: an interrupted run ends as one that was not."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(3000)))
    straight = train(tmp_path / "straight", text)
    train(tmp_path / "broken", text, "--exit-interval", "3")
    resumed = train(tmp_path / "broken", text)
    losses = {number: step.loss for number, step in straight.steps.items()}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    again = {number: step.loss for number, step in resumed.steps.items()}
    again.pop(5), losses.pop(5)  # Megatron's second line after a resume is the mean of two steps
    assert again == losses
    assert (tmp_path / "straight" / "precision.yaml").exists()
