"""The train command from end to end: text in, falling loss, checkpoint, resume, interrupt, full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.train import log, processes
from tests.support.programs import follow_forked

ROOT = Path(__file__).parent.parent.parent


def _command(output: Path, text: Path, *more: str, megatron: tuple[str, ...] = ()) -> list[str]:
    words = ["train", "super", "--tiny", "--device", "cpu", "--output", str(output), "--text", str(text)]
    # Short sequences and evaluations keep the test quick; the model keeps all its parts.
    short = ["--seq-length", "64", *more, "--", "--eval-iters", "1", *megatron]
    return [sys.executable, "-m", "megatron_nemotron3", *words, *short]


def _run(words: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, **kwargs)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real text: some of the standard library's sources."""
    folder = tmp_path_factory.mktemp("text")
    for file in sorted(Path(os.__file__).parent.glob("a*.py"))[:6]:
        (folder / file.name).write_text(file.read_text())
    return folder


def test_an_interrupt_saves_first_and_the_same_command_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    steps = 10
    saving = ("--save-interval", "4", "--async-save", "--use-persistent-ckpt-worker")
    words = _command(output, text, "--steps", str(steps), "--micro-batch-size", "2", megatron=saving)
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while (
        process.poll() is None
        and time.monotonic() < deadline
        # The writer and its queue have saved once.
        and folders.latest_iteration(output / "checkpoints") is None
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    saved = folders.latest_iteration(output / "checkpoints")
    assert saved is not None and saved < steps
    assert f"interrupted: step {saved} is saved; the same command resumes from there" in out
    assert "finishing this step, then saving" in out
    assert saved == max(log.read(str(output / "train.log")).steps)  # nothing is lost

    begun = log.read(str(output / "train.log")).steps
    monkeypatch.setattr(processes, "follow", follow_forked)
    assert cli.main(words[3:]) == 0
    resumed = capsys.readouterr().out
    assert f"resuming from step {saved}" in resumed
    for words_of_the_report in ("unigram baseline", "CPU run", "backend torch"):
        assert words_of_the_report in resumed
    assert (output / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    whole = log.read(str(output / "train.log")).steps
    assert sorted(whole) == list(range(1, steps + 1))
    assert whole[steps].loss < begun[1].loss - 0.3 and len(whole[steps].mtp) == 2
    assert cli.main(words[3:]) == 0
    assert f"already trained to step {steps}" in capsys.readouterr().out


@pytest.mark.full  # its message: test_progress.py; what it leaves: tests/checkpoints/test_kill.py
def test_a_full_disk_leaves_nothing_half_written(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = _command(
        output, text, "--steps", "2", "--micro-batch-size", "2", megatron=("--save-interval", "2")
    )
    # A limit on file size is what a test can have of a full disk: the write of the weights fails.
    limited = ["bash", "-c", 'ulimit -f 8000; trap "" XFSZ; exec "$@"', "bash", *words]
    result = _run(limited)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "saving a checkpoint" in result.stderr and "ulimit -f" in result.stderr
    assert "no checkpoint was saved, and steps 1 to 2 are lost" in result.stderr
    assert list((output / "checkpoints").glob("iter_*")) == []


OPTIMIZER_ON_CPU = ("--", "--use-precision-aware-optimizer", "--optimizer-cpu-offload")
OFFLOADING = ("--", "--fine-grained-activation-offloading", "--offload-modules", "moe_act")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["supper"], "did you mean 'super'"),
        (["super", "--tiny", "--tp", "3"], "TP=3"),
        (["super", "--tiny", "--text", "/nowhere"], "/nowhere"),
        (["super", "--tiny", "--data-path", "x"], "--tokenizer"),
        (["super", "--tiny", "--backend", "te"], "transformer-engine"),
        (["nano-4b"], "--steps"),
        (["super", "--tiny", "--precision", "int3"], "int3"),
        (["super", "--tiny", "--device", "cuda"], "torch sees no GPU"),
        (["super", "--tiny", "--device", "cpu", *OPTIMIZER_ON_CPU], "the optimizer is on a CPU already"),
        (["super", "--tiny", "--device", "cpu", *OFFLOADING], "needs the modules of Transformer Engine"),
    ],
)
def test_bad_input(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in words and __import__("torch").cuda.is_available():
        pytest.skip("a GPU is here")
    output = tmp_path / "run"
    try:
        status = cli.main(["train", "--output", str(output), *words])
    except SystemExit as end:  # what argparse refuses
        status = end.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert status == 2, said
    assert message in said
    assert "Traceback" not in said
    assert not output.exists()
