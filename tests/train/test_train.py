"""The train command from end to end: text in, falling loss, interrupt, resume, full disk; wrong words."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.common import lock
from megatron_nemotron3.train import log, processes
from tests.support.programs import follow_forked, run_python

ROOT = Path(__file__).parents[2]
#: Enough that the signal arrives before the last step.
STEPS = 16


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real text: some of the standard library's sources."""
    folder = tmp_path_factory.mktemp("text")
    for file in sorted(Path(os.__file__).parent.glob("a*.py"))[:6]:
        (folder / file.name).write_text(file.read_text())
    return folder


def _words(output: Path, text: Path, steps: int, *megatron: str) -> list[str]:
    words = ["train", "super", "--tiny", "--device", "cpu", "--output", str(output), "--text", str(text)]
    words += ["--seq-length", "64", "--micro-batch-size", "2", "--steps", str(steps)]
    return [*words, "--", "--eval-iters", "1", *megatron]


@pytest.mark.full
def test_several_machines_start_the_printed_command(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two agents here stand for two machines."""
    monkeypatch.setattr(processes, "machines", lambda ranks, device: ranks)
    words = _words(tmp_path / "run", text, 2)
    words[2:3] = ["--tiny", "--dp", "2"]
    assert cli.main(words) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m" in line
    with socket.socket() as free:
        free.bind(("localhost", 0))
        line = line.replace("HOST:29500", f"localhost:{free.getsockname()[1]}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(["bash", "-c", line], env=env, cwd=tmp_path) for _ in range(2)]
    assert [agent.wait(240) for agent in agents] == [0, 0]
    assert cli.main(words) == 0
    assert "already trained to step 2" in capsys.readouterr().out


@pytest.mark.full  # what a resumed run computes: tests/test_layouts.py; that this command resumes: below
def test_trains_saves_and_resumes_with_the_same_losses(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "follow", follow_forked)
    assert cli.main(_words(tmp_path / "whole", text, 6, "--save-interval", "6")) == 0
    said = capsys.readouterr().out
    assert "unigram baseline" in said and "CPU run" in said and "backend torch" in said
    assert (tmp_path / "whole" / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    expected = log.read(str(tmp_path / "whole" / "train.log")).steps
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert expected[6].loss < expected[1].loss - 0.3
    assert len(expected[6].mtp) == 2

    parts = tmp_path / "parts"
    assert cli.main(_words(parts, text, 6, "--exit-interval", "3", "--save-interval", "6")) == 0
    assert folders.latest_iteration(parts / "checkpoints") == 3
    capsys.readouterr()
    assert cli.main(_words(parts, text, 6, "--save-interval", "6")) == 0
    assert "resuming from step 3" in capsys.readouterr().out
    resumed = log.read(str(parts / "train.log")).steps
    for step in (4, 5, 6):
        assert resumed[step].values["lm loss"] == expected[step].values["lm loss"]
        assert resumed[step].mtp == expected[step].mtp

    assert cli.main(_words(parts, text, 6)) == 0
    assert "already trained to step 6" in capsys.readouterr().out


def test_an_interrupt_saves_first_and_the_same_command_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    # With a writer of its own: test_interrupts.py, nightly.
    words = _words(output, text, STEPS, "--save-interval", "4")
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


#: A limit on file size is what a test can have of a full disk: the write of the weights fails.
LIMITED = """
import resource, sys
from megatron_nemotron3 import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (8_192_000, 8_192_000))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.full  # its message: test_progress.py; what it leaves: tests/checkpoints/test_kill.py
def test_a_full_disk_leaves_nothing_half_written(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = _words(output, text, 2, "--save-interval", "2")
    result = run_python(["-c", LIMITED, *words], tmp_path, OMP_NUM_THREADS="1")
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
