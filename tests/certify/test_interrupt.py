"""However `nemotron3 certify` is ended, no rank goes on, and nothing is half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def session(number: int) -> list[str]:
    """Return the processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                text = (folder / "stat").read_text()
            except OSError:
                continue
            fields = text.rpartition(")")[2].split()
            if int(fields[3]) == number and fields[0] != "Z":
                found.append(folder.name)
    return found


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("alone", 130),
        pytest.param("group", 130, marks=pytest.mark.full),
        pytest.param("term", 143, marks=pytest.mark.full),
        pytest.param("kill", -9, marks=pytest.mark.full),
    ],
)
def test_nothing_is_left(how: str, status: int, tmp_path: Path) -> None:
    fifo, work, out = tmp_path / "fifo", tmp_path / "work", tmp_path / "out"
    os.mkfifo(fifo)
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FIFO": str(fifo), "TMPDIR": str(work)}
    words = [*("certify", "super", "--tp", "2", "--dp", "2"), *("--output", str(out))]
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.certify.waiting", *words],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        ready = ""
        while ready.count("ready") < 2:
            with fifo.open() as file:
                ready += file.read()
        assert len(session(program.pid)) > 2
        if how == "group":
            os.killpg(program.pid, signal.SIGINT)
        else:
            number = {"alone": signal.SIGINT, "term": signal.SIGTERM, "kill": signal.SIGKILL}[how]
            os.kill(program.pid, number)
        printed = program.communicate(timeout=30)[0]
        assert program.returncode == status
        assert "Traceback" not in printed and "noise of a rank" not in printed, printed
        end = time.monotonic() + 20
        while session(program.pid) and time.monotonic() < end:
            time.sleep(0.1)
        assert session(program.pid) == []
        assert not out.exists()
        assert how == "kill" or not [p for p in work.iterdir() if "certify" in p.name]
    finally:
        for pid in session(program.pid):
            os.kill(int(pid), signal.SIGKILL)
        program.wait()
