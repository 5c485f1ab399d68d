"""What bash and zsh get when Tab is pressed: the real shell function asks the real command."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_nemotron3.cli.table import COMMANDS

argcomplete = pytest.importorskip("argcomplete")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `nemotron3` in bin/, a run and a model's file."""
    found = tmp_path_factory.mktemp("shell")
    program = found / "bin/nemotron3"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_nemotron3 "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (found / "script").write_text(argcomplete.shellcode(["nemotron3"]))
    (found / "runs/demo").mkdir(parents=True)
    (found / "mine.json").write_text("{}")
    return found


def bash(text: str, folder: Path) -> str:
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-euc", text], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout


def completed(line: str, folder: Path) -> list[str]:
    """The words that bash offers at the end of a line."""
    return bash(
        ". ./script\n"
        f'COMP_LINE="{line}" COMP_POINT={len(line)} COMP_TYPE=9\n'
        "_python_argcomplete nemotron3\n"
        "printf '%s\\n' \"${COMPREPLY[@]}\"",
        folder,
    ).split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nemotron3 ", {name for name in COMMANDS if " " not in name}),
        ("nemotron3 distill ", {"logits", "projection"}),
        ("nemotron3 report ", {"monitors", "bin/", "mine.json", "runs/", "script"}),
        ("nemotron3 plan b", {"boundary", "bin/"}),
        ("nemotron3 plan boundary --ro", {"--rows", "--rows-per-sample"}),
        ("nemotron3 --ver", {"--version"}),
        ("nemotron3 show super --", {"--help", "--json", "--model", "--tiny"}),
        ("nemotron3 train --model m", {"mine.json"}),
        ("nemotron3 run --device c", {"cpu", "cuda"}),
        ("nemotron3 generate runs/d", {"runs/demo/"}),
        ("nemotron3 convert to-hf runs/demo out --dtype b", {"bfloat16"}),
    ],
)
def test_bash(line: str, words: set[str], folder: Path) -> None:
    assert set(completed(line, folder)) == words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("nemotron3 flags super --gpu gb", (b"gb200", b"gb300")),
    ],
)
def test_zsh(line: str, shown: tuple[bytes, ...], folder: Path) -> None:
    """What an interactive zsh shows when Tab is pressed twice."""
    start = (
        f"path=({folder}/bin $path); autoload -Uz compinit; compinit -u -d {folder}/dump; bindkey -e; "
        f'. {folder}/script; PS1= ; print be"gun"'
    )
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(
            shutil.which("zsh") or "",
            ["zsh", "-f", "-i"],
            {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "COLUMNS": "200"},
        )
    try:
        os.write(terminal, start.encode() + b"\n")
        _read_until(terminal, (b"begun",))
        os.write(terminal, line.encode() + b"\t\t")
        _read_until(terminal, shown)
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _read_until(terminal: int, wanted: tuple[bytes, ...]) -> None:
    read, poll = b"", select.poll()
    poll.register(terminal, select.POLLIN)
    deadline = time.monotonic() + 60
    while not all(word in read for word in wanted):
        assert poll.poll(1000 * max(deadline - time.monotonic(), 0)), read
        read += os.read(terminal, 4096)
