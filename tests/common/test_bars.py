"""Progress on a terminal is a bar with the time left and the rate; elsewhere there are plain lines."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from megatron_nemotron3.common import output
from megatron_nemotron3.common.output import BYTES, Bar
from megatron_nemotron3.train.progress import TrainProgress
from tests.train.test_progress import START, _save

LOSSES = "lm loss: 5.185680E+00 | mtp_1 loss: 5.2E+00 | mtp_2 loss: 5.3E+00"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def last(self) -> str:
        """What the line of the bar shows at last."""
        return re.split("[\r\n]", self.getvalue().rstrip())[-1]


def step(number: int, total: int = 10) -> str:
    return (
        f" [2026] iteration {number:8d}/{total:8d} | elapsed time per iteration (ms): 500.0 | "
        f"global batch size:     4 | {LOSSES} | grad norm: 1.770 |\n"
    )


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    bar = Bar("convert", BYTES, 3_000_000_000, begun=1_000_000_000, stream=stream)
    bar.to(1_500_000_000)
    assert stream.getvalue() == ""  # one every ten seconds
    monkeypatch.setattr(output, "INTERVAL", 0.0)
    monkeypatch.setattr(output.time, "monotonic", lambda: bar._started + 5)
    bar.to(2_000_000_000)
    assert stream.getvalue() == "convert: 2.0 GB of 3.0 GB, 200.0 MB/s, 5 s left\n"
    slow = Bar("recompute", "layers", 88, stream=stream)
    monkeypatch.setattr(output.time, "monotonic", lambda: slow._started + 8)
    slow.to(2)
    assert stream.getvalue().splitlines()[1:] == ["recompute: 2 of 88 layers, 0.2 layers/s, 344 s left"]


def test_without_tqdm_a_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(output, "INTERVAL", 0.0)
    terminal = Terminal()
    bar = Bar("verify", "files", 4, stream=terminal)
    bar.to(1)
    assert terminal.getvalue().startswith("verify: 1 of 4 files, ")


def test_training_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run: the bar begins where it resumes; other lines stand above it."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stdout", terminal)
    seen = TrainProgress(begun=4, total=10, seq_length=512)
    for line in (START, step(5), *_save(5), " validation loss at iteration 6 | lm loss value: 5.0E+00 |\n"):
        time.sleep(0.12)
        seen.line(line)
    for number in (6, 7):
        time.sleep(0.12)
        seen.line(step(number))
    seen.close()
    shown = terminal.last
    assert shown.startswith("train:  70%") and "7/10 [" in shown
    assert "loss 5.186, MTP 5.200 5.300, 4,096 tokens/s" in shown
    assert "step     6  validation loss 5.000" in re.split("[\r\n]", terminal.getvalue())
    assert "step     5/10" not in terminal.getvalue()


def test_training_elsewhere_prints_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    seen = TrainProgress(begun=4, total=10, seq_length=512)
    for line in (START, step(5), step(10)):
        seen.line(line)
    seen.close()
    assert capsys.readouterr().out.splitlines() == [
        f"step {n:5d}/10  loss 5.186  MTP 5.200 5.300  0.50 s/step" for n in (5, 10)
    ]
