"""The train command from end to end: text in, falling loss, interrupt, resume; and words that are wrong."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.common import lock
from megatron_nemotron3.train import log, processes
from tests.support.programs import follow_forked, run_python

STEPS = 10


def test_an_interrupt_saves_first_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    for file in sorted(Path(os.__file__).parent.glob("a*.py"))[:6]:  # of the standard library
        (text / file.name).write_text(file.read_text())
    words = ["train", "super", "--tiny", "--device", "cpu", "--output", str(output), "--text", str(text)]
    words += ["--seq-length", "64", "--micro-batch-size", "2", "--steps", str(STEPS)]
    # With a writer of its own: test_interrupts.py, nightly.
    words += ["--", "--eval-iters", "1", "--save-interval", "4"]
    with ThreadPoolExecutor(1) as pool:
        command = pool.submit(run_python, ["-m", "megatron_nemotron3", *words], tmp_path, OMP_NUM_THREADS="1")
        while not command.done() and folders.latest_iteration(output / "checkpoints") is None:
            time.sleep(0.1)
        holder = lock.holder(output / "checkpoints")
        assert holder is not None
        os.kill(holder.pid, signal.SIGINT)
        done = command.result()
    out = done.stdout
    assert done.returncode == 130, out + done.stderr
    saved = folders.latest_iteration(output / "checkpoints")
    assert saved is not None and saved < STEPS
    assert f"interrupted: step {saved} is saved; the same command resumes from there" in out + done.stderr
    assert "finishing this step, then saving" in out
    assert saved == max(log.read(str(output / "train.log")).steps)  # nothing is lost

    begun = log.read(str(output / "train.log")).steps
    monkeypatch.setattr(processes, "follow", follow_forked)
    assert cli.main(words) == 0
    resumed = capsys.readouterr().out
    for said in (f"resuming from step {saved}", "unigram baseline", "CPU run", "backend torch"):
        assert said in resumed
    assert (output / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    whole = log.read(str(output / "train.log")).steps
    assert sorted(whole) == list(range(1, STEPS + 1))
    assert whole[STEPS].loss < begun[1].loss - 0.3 and len(whole[STEPS].mtp) == 2
    assert cli.main(words) == 0
    assert f"already trained to step {STEPS}" in capsys.readouterr().out


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
