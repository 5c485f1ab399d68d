"""What is printed while a training runs, and at its end: what is on disk, what is lost and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.train import processes, progress
from megatron_nemotron3.train.progress import TrainProgress

START = "[before the start of training step] datetime: 2026-11-22 15:57:46.788281 \n"
END = "[after training is done] datetime: 2026-11-22 15:57:46.788281 \n"
IN_SAVE = '[rank0]:   File "/x/megatron/training/checkpointing.py", line 827, in save_checkpoint\n'
IN_LOAD = '[rank0]:   File "/x/megatron/training/checkpointing.py", line 827, in load_checkpoint\n'
EXCEPTION = "[rank0]: torch.distributed.checkpoint.api.CheckpointException: ranks:dict_keys([0])\n"


def _step(number: int, total: int = 10) -> str:
    return f" [2026] iteration {number:8d}/{total:8d} | lm loss: 5.185680E+00 | grad norm: 1.770 |\n"


def _save(number: int) -> list[str]:
    return [
        f"[2026] saving checkpoint at iteration {number:7d} to /x/checkpoints in torch_dist format\n",
        f"  [2026] successfully saved checkpoint from iteration {number:7d} to /x/checkpoints [ t 1/1 ]\n",
    ]


def _after(*lines: str, interrupts: int = 0) -> TrainProgress:
    progress = TrainProgress()
    for line in lines:
        progress.line(line)
    for _ in range(interrupts):
        progress.interrupted()
    return progress


def test_a_mean_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's sums begin after the last step, after the first line of a process not at all."""
    for begun, lines, expected in (
        (0, (1, 2, 3), ["", " (mean of 2 steps)", ""]),
        (4, (5, 6, 9), ["", " (mean of 2 steps)", " (mean of 3 steps)"]),
    ):
        watched = TrainProgress(begun=begun, averaged=True)
        for number in lines:
            watched.line(_step(number))
        printed = capsys.readouterr().out.splitlines()
        assert [line.partition("5.186")[2].partition("  0.00")[0] for line in printed] == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("OSError: [Errno 122] Disk quota exceeded", "the disk quota is used up"),
        ("OSError: [Errno 27] File too large", "ulimit -f"),
        ("PermissionError: [Errno 13] Permission denied: '/'", "Permission denied: make the folder writable"),
        ("OSError: [Errno 5] Input/output error", "Input/output error: check the disk"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/x'", "is missing"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "collects the results of Megatron's checkpoint writer"),
        ("RuntimeError: results_queue should not be empty", "checkpoint writer ended early"),
        ("MemoryError", "memory is used up"),
        ("RuntimeError: Failed to validate global plan", "cannot save this model in this layout"),
        ("KeyError: 'optimizer'", "KeyError: 'optimizer'"),
    ],
)
def test_a_failed_save_names_its_cause(line: str, expected: str, tmp_path: Path) -> None:
    said = _after(START, _step(4), IN_SAVE, f"[rank0]: {line}\n", EXCEPTION).cause(tmp_path, 1)
    assert said.startswith(f"saving a checkpoint in {tmp_path} failed: ") and expected in said
    assert ("full" in said) == ("Errno 28" in line)


def test_a_save_whose_cause_torch_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports only the position in the file at which it could write no more."""
    lines = (
        "ERROR:x:Local worker 0 encountered an error: [enforce fail at inline_container.cc:672] . pos\n",
        "ERROR:x:An error is caught while starting worker 0, error: <class 'RuntimeError'>\n",
    )
    said = [_after(START, *lines, IN_SAVE, EXCEPTION).cause(tmp_path, 1, need) for need in (1, 1 << 60)]
    assert said[0].endswith("failed: [enforce fail at inline_container.cc:672] . pos")
    assert "the disk is full" in said[1]
    assert "is missing" in _after(START, *lines, IN_SAVE).cause(tmp_path / "none", 1, 1)
    monkeypatch.setattr(progress.resource, "getrlimit", lambda _: (100, 100))
    assert "ulimit -f" in _after(START, *lines, IN_SAVE, EXCEPTION).cause(tmp_path, 1, 1000)


def test_other_failures_are_no_failed_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loading = _after(IN_LOAD, "[rank0]: RuntimeError: size mismatch\n").cause(tmp_path, 1)
    assert loading == "RuntimeError: size mismatch"
    assert "killed by SIGKILL: was the memory used up?" in _after(START).cause(tmp_path, -9)
    killed = _after(START, "  exitcode  : -9 (pid: 12)\n").cause(tmp_path, 1)
    assert killed == "a training process was killed by SIGKILL: was the memory used up?"
    ended = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
        "megatron_nemotron3.run FAILED\n",
        "  exitcode  : -15 (pid: 13174)\n",
    )
    assert _after(*ended).cause(tmp_path, 1) == "a training process was killed by SIGTERM"
    closed = "[rank1]: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:25482\n"
    codes = ("  exitcode  : 1 (pid: 7)\n", "  exitcode  : -6 (pid: 8)\n", "  exitcode  : -15 (pid: 9)\n")
    assert _after(START, closed, *codes).cause(tmp_path, 1) == "a training process was killed by SIGABRT"
    assert "Connection closed" in _after(START, closed, *codes[:1]).cause(tmp_path, 1)
    assert capsys.readouterr().out == ""
    assert _after(START).cause(tmp_path, 3) == "training ended with status 3"
    bare = (
        '[rank0]:   File "/x/site-packages/megatron/core/optimizer/optimizer.py", line 7, in f\n',
        "[rank0]:     assert config.bf16\n",
        "[rank0]:            ^^^^^^^^^^^\n",
        "[rank0]: AssertionError\n",
    )
    said = _after(*bare).cause(tmp_path, 1)
    assert said == "AssertionError in megatron/core/optimizer/optimizer.py, line 7: assert config.bf16"


@pytest.mark.parametrize(
    ("lines", "saved", "complete", "expected"),
    [
        ([], None, True, "no checkpoint was saved; the same command starts again"),
        ([START, _step(8)], 8, True, "step 8 is saved; the same command resumes from there"),
        ([START, _step(8)], 5, False, "step 5 is saved, and steps 6 to 8 are lost; the same command resumes"),
        ([START, _step(8)], None, False, "no checkpoint was saved, and steps 1 to 8 are lost; the same"),
        ([START], 5, False, "step 5 is saved, and what was trained after it is lost; the same"),
        ([START, _step(10), END, *_save(10)], 10, False, "step 10 is saved, which was the last"),
    ],
)
def test_what_is_on_disk(lines: list[str], saved: int | None, complete: bool, expected: str) -> None:
    assert _after(*lines).on_disk(saved, complete).startswith(expected)


def test_what_an_interrupt_does(capsys: pytest.CaptureFixture[str]) -> None:
    """It promises a checkpoint only where one can be written."""
    early = _after()
    assert not early.interrupted() and early.stopped_at_once
    assert "before the first step" in capsys.readouterr().out
    during = _after(START)
    assert during.interrupted() and not during.stopped_at_once
    assert "then saving" in capsys.readouterr().out
    assert not during.interrupted() and during.stopped_at_once
    assert "stopping at once" in capsys.readouterr().out
    late = _after(START, _step(10), END)
    assert late.interrupted() and not late.finished
    for line in _save(10):
        late.line(line)
    assert late.finished and late.stopped_at_once


def test_a_step_is_evaluated_once_and_the_other_evaluation_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = " validation loss at iteration 300 | lm loss value: 5.047692E+00 | lm loss PPL: 156 | \n"
    after = loop.replace("300 |", "300 on validation set |").replace("5.04", "5.12")
    _after(loop, after)
    assert capsys.readouterr().out.splitlines() == [
        "step   300  validation loss 5.048",
        "after training, on the next batches of the validation set: 5.128",
    ]
    _after(after)  # a last step that the training loop did not evaluate
    assert capsys.readouterr().out == "step   300  validation loss 5.128\n"


def _train(folder: Path) -> int:
    (folder / "text.txt").write_text("The quick brown fox.\n" * 1200)
    words = ["train", "nano", "--tiny", "--device", "cpu", "--steps", "2", "--seq-length", "64"]
    return cli.main([*words, "--text", str(folder / "text.txt"), "--output", str(folder / "run")])


def test_a_signal_to_one_rank_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks save and leave with status 0, in the middle of the run."""

    def leave(words: list[str], env: dict[str, str], file: Path, watcher: TrainProgress) -> int:
        for line in (START, _step(1, 2), "[exiting program after receiving SIGTERM.] datetime: 2026-11-27\n"):
            watcher.line(line)
        return 0

    monkeypatch.setattr(processes, "follow", leave)
    assert _train(tmp_path) == 130
    said = capsys.readouterr().out.splitlines()
    assert "a training process received SIGTERM: all have saved, and leave" in said
    assert said[-1].startswith("interrupted: no checkpoint was saved, and step 1 is lost; the same command")


def test_a_failed_save_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an interrupt, too."""

    def fail(words: list[str], env: dict[str, str], file: Path, watcher: TrainProgress) -> int:
        for line in (START, _step(1, 2)):
            watcher.line(line)
        watcher.interrupted()
        for line in (IN_SAVE, "[rank0]: OSError: [Errno 28] No space left on device\n", EXCEPTION):
            watcher.line(line)
        return 1

    monkeypatch.setattr(processes, "follow", fail)
    output = tmp_path / "run"
    assert _train(tmp_path) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert f"saving a checkpoint in {output / 'checkpoints'} failed: the disk is full" in message
    assert "no checkpoint was saved, and step 1 is lost; the same command starts again" in message
    assert str(output / "train.log") in message
    assert folders.latest_iteration(output / "checkpoints") is None
