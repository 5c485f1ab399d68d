"""The lock of a folder: who may write there, and until when."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_nemotron3.common import lock
from megatron_nemotron3.common.switches import LOCK

#: Holds a lock until its input is closed. Arguments: folder, command, key, what to do when it has the lock.
_HOLDER = """
import os, sys, time
from pathlib import Path
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.switches import LOCK
folder, command, key, then = sys.argv[1:]
try:
    with lock.held(Path(folder), command, key=key or None, patience=1.0):
        if then == "fork" and not os.fork():
            time.sleep(600)
        print("holds", flush=True)
        sys.stdin.read()
except ValueError as problem:
    print(problem, flush=True)
    raise SystemExit(2)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that takes a lock; all of them and their children are killed at the end."""
    started = []

    def one(folder: Path, command: str = "train", key: str = "", then: str = "") -> subprocess.Popen[str]:
        words = [sys.executable, "-c", _HOLDER, str(folder), command, key, then]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield one
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_process_is_refused_by_name(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path, "nemotron3 train super")
    assert _said(first) == "holds"
    second = start(tmp_path)
    said = _said(second)
    assert second.wait() == 2
    assert said.startswith(f"{tmp_path} is in use by {first.pid} on {os.uname().nodename} since 2")
    assert said.endswith(": nemotron3 train super (wait for it, or choose another folder)")
    found = lock.holder(tmp_path)
    assert found is not None and (found.pid, found.command) == (first.pid, "nemotron3 train super")


def test_the_lock_ends_with_its_block_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with lock.held(folder), pytest.raises(ValueError, match="in use by"), lock.held(folder):
        pass
    assert list(tmp_path.iterdir()) == []
    assert lock.holder(folder) is None
    with lock.held(folder):
        (folder / "kept").touch()
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_killed_command_leaves_the_folder_to_its_ranks(tmp_path: Path, start: Start) -> None:
    first, rank = start(tmp_path, key="run"), None
    assert _said(first) == "holds"
    rank = start(tmp_path, "rank 0", key="run")
    assert _said(rank) == "holds"
    first.kill()
    first.wait()
    found = lock.holder(tmp_path)
    assert found is not None and found.pid == rank.pid
    second = start(tmp_path)
    assert "waiting for processes that a killed command left" in _said(second)
    said = _said(second)
    assert f"is in use by {first.pid} on " in said and f"(process {rank.pid})" in said
    assert second.wait() == 2
    rank.kill()
    rank.wait()
    assert _said(start(tmp_path)) == "holds"


def test_it_waits_for_orphans_and_then_names_them(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path, then="fork")
    assert _said(first) == "holds"
    first.kill()
    os.waitpid(first.pid, 0)
    lines: list[str] = []
    message = r"one that it started has not \(process \d+\): end it first"
    with (
        pytest.raises(ValueError, match=message) as caught,
        lock.held(tmp_path, patience=1.0, say=lines.append),
    ):
        pass
    assert len(lines) == 1 and "waiting for processes that a killed command left" in lines[0]
    os.kill(int(str(caught.value).rpartition("process ")[2].partition(")")[0]), signal.SIGKILL)
    with lock.held(tmp_path):
        pass


def test_ranks_of_one_run_may_start_in_any_order(tmp_path: Path, start: Start) -> None:
    ranks = [start(tmp_path, f"rank {rank}", key="run") for rank in range(3)]
    assert [_said(rank) for rank in ranks] == ["holds"] * 3
    assert len((tmp_path / lock.NAME).read_text().splitlines()) == 3


def test_a_reader_does_not_get_in_the_way(tmp_path: Path) -> None:
    """`holder` takes the lock for a moment; a writer that comes just then waits."""
    end = time.monotonic() + 1.0
    reader = os.fork()
    if not reader:
        while time.monotonic() < end + 1:
            lock.holder(tmp_path)
        os._exit(0)
    taken = 0
    while time.monotonic() < end:
        with lock.held(tmp_path):
            taken += 1
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    assert taken > 5


def _no_flock(descriptor: int, kind: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ENOTSUP])
def test_without_kernel_locks_the_record_counts(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lines: list[str] = []
    with lock.held(tmp_path, "train", key="run", say=lines.append):
        assert lines == [
            f"{tmp_path}: the file system has no locks; {lock.NAME} alone says that this run writes here"
        ]
        message = "the file system has no locks: if that process has ended, remove"
        with pytest.raises(ValueError, match=message), lock.held(tmp_path):
            pass
        rank = os.fork()
        if not rank:
            with lock.held(tmp_path, "rank", key="run", say=lines.append):
                os._exit(len(lines))
        assert os.waitpid(rank, 0)[1] >> 8 == 1
    assert lock.holder(tmp_path) is None


def test_another_failure_of_the_lock_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=f"Input/output error.*{lock.NAME}"), lock.held(tmp_path):
        pass


def test_without_kernel_locks_one_of_many_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    begin, end = time.time() + 0.2, time.time() + 2.0
    racing = []
    for _ in range(6):
        if pid := os.fork():
            racing.append(pid)
            continue
        status = 1
        with contextlib.suppress(ValueError):
            time.sleep(max(0.0, begin - time.time()))
            with lock.held(tmp_path, say=lambda _line: None):
                status = 0
                time.sleep(max(0.0, end - time.time()))
        os._exit(status)
    assert sorted(os.waitpid(pid, 0)[1] >> 8 for pid in racing) == [0, 1, 1, 1, 1, 1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["pid", "boot", "start"])
def test_a_record_of_an_ended_process_is_no_obstacle(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its number is another process's by now, or the machine was started again."""
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    with lock.held(tmp_path, say=lambda _line: None):
        record = json.loads((tmp_path / lock.NAME).read_text())
    ended = subprocess.Popen(["true"])
    ended.wait()
    record[change] = {"pid": ended.pid, "boot": "another", "start": 1}[change]
    (tmp_path / lock.NAME).write_text(json.dumps(record) + "\n")
    with lock.held(tmp_path, say=lambda _line: None):
        pass


def test_a_record_of_another_machine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    record = {
        "host": "far",
        "pid": 1,
        "command": "a\x1b[2J",
        "since": "then",
        "key": "k",
        "boot": "",
        "start": 0,
    }
    (tmp_path / lock.NAME).write_text(json.dumps(record) + "\n")
    message = r"in use by 1 on far since then: a\\x1b\[2J \(wait"
    with pytest.raises(ValueError, match=message), lock.held(tmp_path):
        pass


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / lock.NAME
    {"fifo": os.mkfifo, "link": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    with pytest.raises(ValueError, match="no regular file"), lock.held(tmp_path):
        pass
    assert lock.holder(tmp_path) is None


@pytest.mark.parametrize(
    "text", [b"", b"\xff\x00", b"[1]\n", b'{"pid": "x"}\n', b"[" * 100_000, b'{"pid":1}']
)
def test_a_damaged_record_is_no_obstacle(text: bytes, tmp_path: Path) -> None:
    (tmp_path / lock.NAME).write_bytes(text)
    with lock.held(tmp_path):
        assert lock.holder(tmp_path) is not None


def test_ranks_share_a_key_and_single_processes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LOCK, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert lock.run_key() != lock.run_key()
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert lock.run_key() == lock.run_key()
    monkeypatch.setenv(LOCK, "given")
    assert lock.run_key() == "given"
