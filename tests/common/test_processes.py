"""Which signals and deaths end a rank, and what it has started. Without torch: a rank of a second."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megatron_nemotron3.common import processes
from megatron_nemotron3.common.processes import descendants
from megatron_nemotron3.common.ranks import free_port
from megatron_nemotron3.common.switches import CONTROL

ROOT = Path(__file__).parents[2]
#: What Megatron's writers are: a manager that is spawned, a process that is forked, one of the fork server.
SCRIPT = """
import multiprocessing, os, signal, sys, time
class Mine:
    def answer(self): return 42
def ask(mine, queue): queue.put(mine.answer())
if __name__ == "__main__":
    asked = []
    if "saves" in sys.argv: signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    spawn, fork = multiprocessing.get_context("spawn"), multiprocessing.get_context("fork")
    queue = spawn.Manager().Queue()
    forked = fork.Process(target=time.sleep, args=(60,), daemon=True); forked.start()
    server = multiprocessing.get_context("forkserver")
    ended, stays = (server.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2))
    ended.start(); stays.start(); time.sleep(0.5); ended.terminate()
    for context in (spawn, server):
        child = context.Process(target=ask, args=(Mine(), queue)); child.start()
        assert queue.get(timeout=30) == 42; child.join()
    ended.join(10); assert ended.exitcode is not None and stays.is_alive()
    print("ready", flush=True)
    while not asked: time.sleep(0.05)
    queue.put("a result"); assert queue.get() == "a result" and forked.is_alive()
    os.kill(stays.pid, 0)  # its server, which would tell, may have been ended by a signal to the group
    print("saved", flush=True)
"""
LAUNCH = (
    "import sys; from megatron_nemotron3.common import processes, spawned\n{before}\n"
    "with processes.as_rank():\n    {run}"
)


@contextmanager
def _rank(tmp_path: Path, *words: str, control: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A rank that has started its children, in a process group of its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    code = LAUNCH.format(before="", run=f"spawned.run_script({str(tmp_path / 'script.py')!r})")
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | ({CONTROL: "1"} if control else {})
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stdout.read()
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _all_ended(those: list[psutil.Process], within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(process.is_running() for process in those):
            return True
        time.sleep(0.1)
    return False


def test_no_child_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    with _rank(tmp_path) as rank:
        children = descendants(rank.pid)
        assert (
            len(children) >= 5
        )  # the manager, the forked process, the fork server and its own, the resource tracker
        rank.kill()
        rank.wait()
        assert _all_ended(children)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_the_death_of_a_process_is_seen_with_many_open_files() -> None:
    """The descriptor of a process has a number that select() does not take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 1200:
        pytest.skip(f"at most {limits[1]} open files")
    process = subprocess.Popen(["sleep", "60"])
    files: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    try:
        while not files or files[-1] < 1024:
            files.append(os.open(os.devnull, os.O_RDONLY))
        assert processes.alive(process.pid)
        process.kill()
        process.wait()
        assert not processes.alive(process.pid)
    finally:
        process.kill()
        for descriptor in files:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "signum",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.full) for one in (signal.SIGINT, signal.SIGHUP))],
    ids=str,
)
def test_a_signal_to_the_group_lets_a_rank_save(tmp_path: Path, signum: signal.Signals) -> None:
    """What a terminal and torchrun do: the rank's children are sent the signal, too."""
    with _rank(tmp_path, "saves") as rank:
        children = descendants(rank.pid)
        os.killpg(rank.pid, signum)
        out, _ = rank.communicate(timeout=30)
        assert rank.returncode == 0 and out.splitlines()[-1] == "saved" and "Traceback" not in out
        assert ("finishing the step, then saving" in out) == (signum != signal.SIGTERM)
        assert _all_ended(children)


def test_an_interrupt_that_nothing_handles_has_no_traceback(tmp_path: Path) -> None:
    with _rank(tmp_path) as rank:
        children = descendants(rank.pid)
        os.killpg(rank.pid, signal.SIGINT)
        out, _ = rank.communicate(timeout=30)
        assert rank.returncode == 130 and out == "megatron_nemotron3.run: interrupted\n"
        assert _all_ended(children)


def test_the_control_pipe_asks_and_its_end_ends(tmp_path: Path) -> None:
    with _rank(tmp_path, "saves", control=True) as rank:
        assert rank.stdin is not None
        os.killpg(rank.pid, signal.SIGINT)  # not the rank's business: `nemotron3 train` decides
        rank.stdin.write("s")
        rank.stdin.flush()
        assert rank.stdout is not None and rank.stdout.read() == "saved\n"
    with _rank(tmp_path, "saves", control=True) as rank:
        children = descendants(rank.pid)
        assert rank.stdin is not None
        rank.stdin.close()  # what the death of `nemotron3 train` does
        assert rank.wait(timeout=10) == processes.ORPHANED
        assert _all_ended(children)


def test_a_rank_ends_with_the_agent_of_torchrun() -> None:
    code = LAUNCH.format(before="", run="import time; print('ready', flush=True); time.sleep(60)")
    agent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "x"}
    with subprocess.Popen([sys.executable, "-c", agent], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        ranks = descendants(process.pid)
        assert len(ranks) == 1
        process.kill()
        process.wait()
        assert _all_ended(ranks)


def test_the_agent_passes_no_signal_on(tmp_path: Path) -> None:
    code = LAUNCH.format(before="processes.as_agent()", run="pass").split("\nwith")[0]
    code += "\nprint('ready', flush=True); import time; time.sleep(60)"
    env = {**os.environ, "PYTHONPATH": str(ROOT), CONTROL: "1"}
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None and agent.stdout is not None and agent.stdout.readline() == b"ready\n"
        agent.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert agent.poll() is None
        agent.stdin.close()
        assert agent.wait(timeout=10) == processes.ORPHANED


def test_a_parent_can_terminate_its_child(tmp_path: Path) -> None:
    """multiprocessing does it at exit, and waits."""
    run = "import multiprocessing as m, time\n"
    run += "    p = m.get_context('fork').Process(target=time.sleep, args=(60,))\n"
    run += "    p.start(); time.sleep(0.3); p.terminate(); p.join(10); print(p.exitcode)"
    code = LAUNCH.format(before="", run=run)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout == "143\n", result.stderr


def test_a_free_port_is_none_that_the_kernel_gives_away() -> None:
    """A connection that gloo opens before the store listens cannot get it."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    ports = {free_port() for _ in range(50)}
    assert min(ports) >= 1024 and max(ports) < first
    assert len(ports) > 40


def test_without_shared_memory_one_process_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /dev/shm is read-only: the number of the workers' progress has no place."""

    def refuse(*given: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/dev/shm/pym-1")

    monkeypatch.setattr(multiprocessing.get_context("fork"), "Value", refuse, raising=False)
    seen: list[int] = []

    def work(item: int, count: Callable[[int], None]) -> tuple[int, int]:
        count(item)
        return item * item, os.getpid()

    own = os.getpid()
    assert list(processes.parallel_map(work, [1, 2, 3], workers=2, report=seen.append)) == [
        (1, own), (4, own), (9, own),
    ]  # fmt: skip
    assert seen == [6]
    assert list(processes.ordered_map(lambda item: (-item, os.getpid()), [1, 2], 2)) == [
        (1, (-1, own)), (2, (-2, own)),
    ]  # fmt: skip
