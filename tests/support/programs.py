"""Python programs and `nemotron3 train` without the ten seconds in which a new process imports Megatron."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from megatron_nemotron3.common.ranks import RANK_VARIABLES
from megatron_nemotron3.train.processes import Watcher
from tests.support.distributed import run_fresh, run_launcher


def run_python(words: Sequence[str], folder: Path, timeout: float = 240, **env: str) -> CompletedProcess[str]:
    """Run `python WORDS…` in a folder, in a process forked from one that has imported Megatron.

    WORDS is `-c CODE`, `-m MODULE ARGS…` or `SCRIPT ARGS…`. Output of the program's own child processes is
    captured, too. It sees no GPU, which a forked process could not use.
    """
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", **env}):
        status, out, err = run_fresh(_program, list(words), str(folder), timeout=timeout)
    return CompletedProcess(["python", *words], status, out, err)


def _program(words: list[str], folder: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr); runs in the forked process, which ends afterwards."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.chdir(folder)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        status = _status_of(words)
        sys.stdout.flush()
        sys.stderr.flush()
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def _status_of(words: list[str]) -> int:
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def follow_forked(words: Sequence[str], env: dict[str, str], log: Path, watcher: Watcher) -> int:
    """Stand in for `train.processes.follow`: the training processes are forked.

    A test replaces `follow` by it where the process itself is not what is tested.
    """
    launcher = words.index("megatron_nemotron3.run")
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words[:launcher] else 1
    with mock.patch.dict(os.environ, env):
        lines = run_launcher(list(words[launcher + 1 :]), ranks, timeout=300).splitlines(keepends=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.writelines(lines)
    for line in lines:
        watcher.line(line)
    return 0
