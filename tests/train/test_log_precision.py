"""`--log-precision` from the command line: what is refused before anything starts, and a whole run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3 import run as launcher
from megatron_nemotron3.common.ranks import RANK_VARIABLES
from megatron_nemotron3.common.switches import LOG_PRECISION
from megatron_nemotron3.launch import Launch, TrainingSchedule
from megatron_nemotron3.precision import report
from megatron_nemotron3.precision.settings import Logging
from megatron_nemotron3.train import log
from megatron_nemotron3.train.training import TrainRequest, _measurement
from tests.support.programs import run_python

TRAIN = ["train", "super", "--tiny", "--device", "cpu"]
SPEC = ["--spec", "megatron_nemotron3.specs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log-precision=often"], "--log-precision often: give at least 1 iteration"),
        (["--log-precision", "0"], "--log-precision 0: give at least 1 iteration"),
    ],
)
def test_refused(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*TRAIN, *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert not list(tmp_path.iterdir())


def request(
    schedule: TrainingSchedule, *, backend: str = "torch", log_precision: int | None = 0
) -> TrainRequest:
    launch = Launch.of("super", tiny=True, backend=backend, schedule=schedule)
    return TrainRequest(launch=launch, device="cpu", output=Path("runs/mine"), log_precision=log_precision)


def test_when() -> None:
    """An interval that was given counts; else the last step of a short run is measured."""
    here = str(Path("runs/mine").resolve())
    long, short = TrainingSchedule(train_iters=300), TrainingSchedule(train_iters=40)
    assert _measurement(request(long, log_precision=None)) is None
    assert _measurement(request(long)) == Logging(100, here)
    assert _measurement(request(short)) == Logging(40, here)
    assert _measurement(request(short, log_precision=7)) == Logging(7, here)
    assert _measurement(request(TrainingSchedule())) == Logging(100, here)
    for backend in ("te", "auto"):
        with pytest.raises(ValueError, match=f"not of {backend}: use --backend torch"):
            _measurement(request(long, backend=backend))


@pytest.mark.parametrize(
    ("value", "arguments", "message"),
    [
        ("0.5", [], f"{LOG_PRECISION}='0.5': give an interval"),
        ("5", [], "another one: use --spec megatron_nemotron3.specs nemotron3_torch_stack_spec"),
        ("5", [*SPEC, "nemotron3_te_stack_spec"], "nemotron3_te_stack_spec"),
    ],
)
def test_the_launcher_refuses(
    value: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('started')")
    monkeypatch.setenv(LOG_PRECISION, value)
    for name in RANK_VARIABLES:
        monkeypatch.setenv(name, {"MASTER_ADDR": "localhost", "WORLD_SIZE": "1"}.get(name, "0"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stopped:
        launcher.main(["--device", "cpu", str(script), *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.full
def test_from_the_command_line(tmp_path: Path) -> None:
    """Emulated: file and table are there, and losses are those of a run without."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(3000)))
    words = ["-m", "megatron_nemotron3", *TRAIN, "--steps", "3", "--seq-length", "64", "--text", str(text)]
    words += ["--micro-batch-size", "1", "--global-batch-size", "2", "--precision", "nvfp4", "--emulate"]
    steps = {}
    for name, more in (("measured", ["--log-precision"]), ("off", [])):
        folder = tmp_path / name
        megatron = ["--", "--eval-iters", "0", "--log-interval", "1"]
        done = run_python([*words, "--output", str(folder), *more, *megatron], tmp_path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        steps[name] = log.read(str(folder / "train.log")).steps
        assert (folder / report.FILE).exists() == bool(more)
        if more:
            assert "precision at iteration 3 (2 measured from 1 on)" in done.stdout
            assert "weight gradients exactly zero: " in done.stdout
    rows = report.read(tmp_path / "measured")
    assert {(row.module, row.format) for row in rows} >= {
        ("mixer.in_proj", "nvfp4"),
        ("mixer.out_proj", "mxfp8"),
        ("mlp.experts.linear_fc2", "nvfp4"),
    }
    assert {row.used for row in rows} == {True}
    measured, off = ([(s.loss, s.values["grad norm"]) for s in of.values()] for of in steps.values())
    assert measured == off
