"""Follow a process: its log, interrupts, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from megatron_nemotron3.train import processes
from tests.support.interrupted_runs import ROOT

#: What a rank does with the control pipe.
OBEYS = "import sys; print('ready', flush=True); sys.stdin.read(1); print('saved', flush=True)"
IGNORES = "import time; print('ready', flush=True); time.sleep(60)"


class Watcher:
    """Asks for a save at the first interrupt; interrupts itself when the process is ready."""

    def __init__(self, interrupts: int = 0) -> None:
        self.lines: list[str] = []
        self.interrupts = 0
        self.finished = False
        self._left = interrupts

    def line(self, text: str) -> None:
        self.lines.append(text)
        if text == "ready\n" and self._left:
            self._interrupt()

    def _interrupt(self) -> None:
        self._left -= 1
        os.kill(os.getpid(), signal.SIGTERM)
        if self._left:
            threading.Timer(0.5, self._interrupt).start()

    def interrupted(self) -> bool:
        self.interrupts += 1
        return True


def _follow(code: str, log: Path, watcher: Watcher) -> int:
    return processes.follow([sys.executable, "-c", code], dict(os.environ), log, watcher)


def test_an_interrupt_asks_and_sends_no_signal(tmp_path: Path) -> None:
    watcher = Watcher(interrupts=1)
    assert _follow(OBEYS, tmp_path / "log", watcher) == 0
    assert watcher.lines == ["ready\n", "saved\n"] and watcher.interrupts == 1
    assert (tmp_path / "log").read_text() == "ready\nsaved\n"


@pytest.mark.parametrize("interrupts", [0, 1])
def test_torchruns_folder_of_logs_is_removed(
    interrupts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun makes it in the folder of PET_LOG_DIR, or for good where temporary files are."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.run import get_args_parser

    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    watcher = Watcher(interrupts=interrupts)
    made = "import os; os.mkdir(os.environ['PET_LOG_DIR'] + '/none_x'); "
    ends = OBEYS if interrupts else "print(os.environ['PET_LOG_DIR'])"
    assert _follow(made + ends, tmp_path / "log", watcher) == 0
    assert watcher.lines and os.listdir(place) == []
    monkeypatch.setenv("PET_LOG_DIR", str(place / "logs"))
    assert get_args_parser().parse_args(["script.py"]).log_dir == str(place / "logs")
    assert DefaultLogsSpecs(log_dir=str(place / "logs")).root_log_dir == str(place / "logs")
    assert os.listdir(place) == ["logs"]


def test_a_second_interrupt_ends_what_does_not_obey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    watcher = Watcher(interrupts=2)
    child = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    assert (
        _follow(f"{child}; print(p.pid, flush=True); {IGNORES}", tmp_path / "log", watcher) == -signal.SIGKILL
    )
    assert watcher.interrupts == 2
    status = Path(f"/proc/{watcher.lines[0].strip()}/status")
    deadline = time.monotonic() + 10
    while (alive := status.exists() and "zombie" not in status.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def test_a_full_disk_under_the_log_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, watcher = tmp_path / "train.log", Watcher()
    log.symlink_to("/dev/full")
    assert _follow("print('one'); print('two')", log, watcher) == 0
    assert watcher.lines == ["one\n", "two\n"]
    assert capsys.readouterr().out == f"{log} is incomplete: No space left on device\n"
    assert os.listdir(tmp_path) == []  # no empty log


def test_a_closed_pipe_is_an_interrupt(tmp_path: Path) -> None:
    """`nemotron3 train … | head`, or a terminal that is closed."""
    code = f"""
import os, sys
from pathlib import Path
from megatron_nemotron3.train import processes
from megatron_nemotron3.train.progress import TrainProgress
progress = TrainProgress(verbose=True)
progress.training = True
words = [sys.executable, "-c", {OBEYS!r}]
sys.exit(100 + processes.follow(words, dict(os.environ), Path({str(tmp_path / "log")!r}), progress))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 100
    assert (tmp_path / "log").read_text() == "ready\nsaved\n"


def test_a_narrow_model_computes_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def threads(*asked: object) -> str | None:
        return processes.environment(*asked).get("OMP_NUM_THREADS")  # type: ignore[arg-type]

    assert threads(2, "cpu", 4096) == threads(2, "cpu") == "4"
    assert threads(2, "cpu", 128) == threads(16, "cpu", 4096) == "1"
    assert threads(2, "cuda", 128) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(2, "cpu", 128) == "3"
