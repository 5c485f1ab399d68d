"""However `nemotron3 certify` is ended, no rank goes on, and nothing is half-written."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_nemotron3.common import lock

ROOT = Path(__file__).parents[3]
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


def left_soon(number: int) -> list[str]:
    """Return the processes of a session that do not end within 20 seconds."""
    end = time.monotonic() + 20
    while session(number) and time.monotonic() < end:
        time.sleep(0.1)
    return session(number)


def wait_for_both(fifo: Path, program: subprocess.Popen[str]) -> None:
    """Wait until two ranks have written to a pipe, which stays open between them."""
    ready, end = b"", time.monotonic() + 120
    pipe, poll = os.open(fifo, os.O_RDWR | os.O_NONBLOCK), select.poll()
    poll.register(pipe, select.POLLIN)
    try:
        while ready.count(b"ready") < 2:
            if program.poll() is not None:
                raise AssertionError(program.stdout.read()[-600:])
            assert time.monotonic() < end
            if poll.poll(1000):
                ready += os.read(pipe, 100)
    finally:
        os.close(pipe)


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
    # The path of a socket below it has at most 107 characters, and pytest's folders are long.
    work = Path(tempfile.mkdtemp())
    fifo, out = tmp_path / "fifo", tmp_path / "out"
    os.mkfifo(fifo)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FIFO": str(fifo), "TMPDIR": str(work)}
    words = [*("certify", "super", "--tp", "2", "--dp", "2"), *("--output", str(out))]
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.proof.certify.waiting", *words],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_both(fifo, program)
        assert len(session(program.pid)) > 2
        if how == "group":
            os.killpg(program.pid, signal.SIGINT)
        else:
            number = {"alone": signal.SIGINT, "term": signal.SIGTERM, "kill": signal.SIGKILL}[how]
            os.kill(program.pid, number)
        printed = program.communicate(timeout=30)[0]
        assert program.returncode == status
        assert "Traceback" not in printed and "noise of a rank" not in printed, printed
        assert left_soon(program.pid) == []
        # Nobody is left to remove the file of a lock that the kernel has taken back.
        assert not out.exists() or how == "kill" and [p.name for p in out.iterdir()] == [lock.NAME]
        assert lock.holder(out) is None
        assert how == "kill" or not [p for p in work.iterdir() if "certify" in p.name]
    finally:
        for pid in session(program.pid):
            os.kill(int(pid), signal.SIGKILL)
        program.wait()
        shutil.rmtree(work)


#: Where Megatron sets up its groups, a rank says so and waits.
WAITING = """
import time

def initialize_model_parallel(*args, **kwargs):
    open({fifo!r}, "w").write("ready")
    time.sleep(60)
"""


def checkout_that_waits_in_its_import(folder: Path, fifo: Path) -> None:
    core = folder / "megatron/core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    (core / "__init__.py").write_text(
        f"import time\nopen({str(fifo)!r}, 'w').write('ready')\ntime.sleep(60)\n"
    )


def checkout_that_waits_in_its_ranks(folder: Path, fifo: Path) -> None:
    installed = Path(importlib.util.find_spec("megatron.core").origin).parents[1]
    shutil.copytree(installed, folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "megatron/core/parallel_state.py").open("a") as file:
        file.write(WAITING.format(fifo=str(fifo)))


@pytest.mark.parametrize(
    "checkout",
    [
        checkout_that_waits_in_its_import,
        pytest.param(checkout_that_waits_in_its_ranks, marks=pytest.mark.full),
    ],
)
def test_nothing_is_left_of_a_comparison(checkout: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """Interrupted while the other Megatron is imported or trains, by Ctrl-C in this process alone."""
    fifo, out = tmp_path / "fifo", tmp_path / "out"
    os.mkfifo(fifo)
    checkout(tmp_path / "Megatron-LM", fifo)
    words = ["certify", "super", "--tp", "2", "--dp", "1", "--output", str(out)]
    program = subprocess.Popen(
        [sys.executable, "-m", "megatron_nemotron3", *words, "--against", str(tmp_path / "Megatron-LM")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert fifo.read_text().startswith("ready")
        os.kill(program.pid, signal.SIGINT)
        printed = program.communicate(timeout=30)[0]
        assert program.returncode == 130
        assert "Traceback" not in printed
        assert left_soon(program.pid) == []
        assert not out.exists()
    finally:
        for pid in session(program.pid):
            os.kill(int(pid), signal.SIGKILL)
        program.wait()
