"""`nemotron3 train` interrupted at random moments. For more of them: `tests.support.interrupted_runs`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.common.processes import descendants
from megatron_nemotron3.train.processes import ENTRY
from tests.support import interrupted_runs as runs

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("signum", [INT, TERM, KILL], ids=str)
def test_at_random_moments(signum: signal.Signals, ranks: int, asynchronous: bool) -> None:
    outcomes = runs.moments(runs.Kind(signum, ranks, asynchronous), count=4, seed=1)
    assert [outcome for outcome in outcomes if outcome.problems] == []


@pytest.mark.parametrize("signum", [INT, TERM], ids=str)
def test_during_imports_there_is_no_traceback(signum: signal.Signals, tmp_path: Path) -> None:
    """The command has begun to import torch, which takes seconds."""
    words = runs.command(tmp_path / "run", runs.Kind())
    process = subprocess.Popen(
        words, cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.send_signal(signum)
    said = process.communicate(timeout=60)[0]
    # An import may swallow the first interrupt, or turn it into an error of its own.
    assert process.returncode == 128 + signum, said
    assert said.strip().split(": ")[-1] == "interrupted" and len(said.strip().splitlines()) == 1, said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("call", ["setitimer", "signal"])
def test_a_command_that_has_ended_has_no_traceback(call: str) -> None:
    """The interrupt comes when the status is known and the handlers are being put back."""
    code = (
        "import os, signal, sys\n"
        "sys.argv = ['nemotron3', 'show', 'super']\n"
        "from megatron_nemotron3 import __main__, cli\n"
        "def ending(*given):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return before(*given)\n"
        "def command():\n"
        "    global before\n"
        f"    before, signal.{call} = signal.{call}, ending\n"
        "    return 0\n"
        "cli.main = command\n"
        "sys.exit(__main__.main())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("lost", "signum"),
    [
        ("destructor", TERM),
        *(pytest.param("weakref callback", one, marks=pytest.mark.full) for one in (INT, TERM)),
    ],
)
def test_an_interrupt_that_python_discards_comes_again(lost: str, signum: signal.Signals) -> None:
    code = (
        "import os, signal, sys, time, weakref\n"
        "sys.argv = ['nemotron3', 'show', 'super']\n"
        "from megatron_nemotron3 import __main__, cli\n"
        "class One:\n"
        "    def __del__(self):\n"
        "        interrupt('destructor')\n"
        "def interrupt(where, kept=None):\n"
        f"    if where == {lost!r}:\n"
        f"        os.kill(os.getpid(), {int(signum)})\n"
        "def command():\n"
        "    one = One()\n"
        "    kept = weakref.ref(one, lambda _: interrupt('weakref callback'))\n"
        "    del one\n"
        "    time.sleep(30)\n"
        "    return 0\n"
        "cli.main = command\n"
        "sys.exit(__main__.main())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (128 + signum, "", "interrupted\n")


@pytest.mark.full
def test_a_signal_to_one_rank_interrupts_the_run(tmp_path: Path) -> None:
    """All ranks save and leave; the command does not say that the run is complete."""
    folder = tmp_path / "run"
    words = runs.command(folder, runs.Kind(ranks=2))
    process = subprocess.Popen(
        words, cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while process.poll() is None and folders.latest_iteration(folder / "checkpoints") is None:
        time.sleep(0.05)
    agent = "megatron_nemotron3.train.agent"
    ranks = [p for p in descendants(process.pid) if agent not in p.cmdline() and str(ENTRY) in p.cmdline()]
    last = max(ranks, key=lambda rank: rank.pid)
    last.send_signal(TERM)
    said = process.communicate(timeout=120)[0]
    saved = folders.latest_iteration(folder / "checkpoints")
    assert process.returncode == 130 and saved is not None and saved < runs.STEPS, said
    assert "a training process received SIGTERM" in said
    assert said.splitlines()[-1] == f"interrupted: step {saved} is saved; the same command resumes from there"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        pytest.param("megatron_nemotron3.cli.table", "\nnemotron3: interrupted\n", id="command line"),
        pytest.param("megatron_nemotron3.models.show", "interrupted\n", id="command"),
    ],
)
def test_imports_have_no_traceback(module: str, said: str) -> None:
    code = (
        "import builtins, os, signal, sys\n"
        "sys.argv = ['nemotron3', 'show', 'super']\n"
        "before = builtins.__import__\n"
        "def importing(name, *rest):\n"
        f"    if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return before(name, *rest)\n"
        "builtins.__import__ = importing\n"
        "from megatron_nemotron3.__main__ import main\n"
        "sys.exit(main())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", said)
