"""Start the training processes, follow their log, and at an interrupt let them save first."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from megatron_nemotron3.common.interrupts import GROUP_SIGNALS, handling
from megatron_nemotron3.common.output import count
from megatron_nemotron3.common.processes import NARROW, THREADS, descendants
from megatron_nemotron3.common.switches import CONTROL
from megatron_nemotron3.launch import Launch
from megatron_nemotron3.launch.plan.activation_forms import RankShare
from megatron_nemotron3.launch.plan.memory import memory
from megatron_nemotron3.models.lora import in_environment

if TYPE_CHECKING:
    import psutil

ENTRY = Path(__file__).parent / "pretrain_script.py"
#: Ranks on a CPU, of which each needs 0.7 GiB.
_MOST = 1024
#: Seconds between two checks for an interrupt.
INTERVAL = 0.2
#: Seconds from the request to end until processes are killed.
PATIENCE = 5.0


class Watcher(Protocol):
    """Who reads the log."""

    def line(self, text: str) -> None: ...

    def interrupted(self) -> bool:
        """Say what an interrupt does; return whether the processes are to save, or else to stop at once."""

    @property
    def finished(self) -> bool:
        """Whether after an interrupt nothing is left to wait for."""


def command(argv: Sequence[str], world_size: int, device: str, script: Path = ENTRY) -> list[str]:
    """Return the command line: our launcher, under torchrun if there are several ranks."""
    start = [sys.executable]
    if world_size > 1:
        start += ["-m", "megatron_nemotron3.train.agent", "--standalone", "--nproc-per-node", str(world_size)]
    return [*start, "-m", "megatron_nemotron3.run", "--device", device, str(script), *argv]


def machines(ranks: int, device: str) -> int:
    """Number of machines like this one, with a GPU for each rank.

    Raises:
        ValueError: no number of them has as many GPUs as there are ranks, or there are too many for a CPU.
    """
    if device == "cpu":
        if ranks > _MOST:
            raise ValueError(
                f"{ranks:,} ranks of a CPU: give a layout of at most {_MOST:,}, each is a process"
            )
        return 1
    import torch

    gpus = torch.cuda.device_count()
    if ranks > gpus and ranks % gpus:
        raise ValueError(
            f"{count(ranks, 'rank')}, but this machine has {count(gpus, 'GPU')}: give a layout of at most "
            f"{gpus}, or for several machines of a multiple of {gpus}"
        )
    return max(1, ranks // gpus)


def on_each_machine(
    argv: Sequence[str], ranks: int, number: int, device: str, variables: Mapping[str, str]
) -> str:
    """Return how the ranks are started on `number` machines; `variables`: added to the environment's own."""
    own = {name: value for name, value in os.environ.items() if name.startswith("NEMOTRON3_")}
    words = [f"{name}={value}" for name, value in sorted({**own, **variables}.items())]
    words += ["torchrun", "--nnodes", str(number), "--nproc-per-node", str(ranks // number)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    words += ["-m", "megatron_nemotron3.run", "--device", device, str(ENTRY), *argv]
    return (
        f"{ranks} ranks need {number} machines like this one. Run this on each, in {Path.cwd()} with the "
        "same files, and with the name of one of them for HOST; afterwards this command goes on:\n"
        f"{shlex.join(['env', *words])}"
    )


def environment(world_size: int, device: str, hidden_size: int | None = None) -> dict[str, str]:
    """The caller's environment; on a CPU each rank gets its share of the cores, one in a narrow model."""
    result = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        narrow = hidden_size is not None and hidden_size <= NARROW
        share = max(1, (os.cpu_count() or 1) // world_size)
        result.setdefault(THREADS, str(1 if narrow else share))
        result.setdefault("PYTHONWARNINGS", "ignore")
    # The package may be in use from a checkout without being installed.
    here = str(Path(__file__).parent.parent.parent)
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [here, result.get("PYTHONPATH")]))
    return result


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does."""
    with handling(GROUP_SIGNALS, signal.default_int_handler):
        yield


def follow(words: Sequence[str], env: dict[str, str], log: Path, watcher: Watcher) -> int:
    """Run a command, append its output to `log`, give each line to `watcher`; return the exit status.

    At the first interrupt (SIGINT, SIGTERM or SIGHUP) the processes save and leave if the watcher says so; a
    second one ends them. They get no signal, which would also reach the processes that the ranks save with,
    but a request in the control pipe (`common/processes.py`). A closed terminal counts as an interrupt.
    """
    run = _Run(words, env, log, watcher)
    interrupts = 0

    def count(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupts  # it acts below: printing here could interrupt a print
        interrupts += 1

    handled = 0
    try:
        with handling(GROUP_SIGNALS, count):
            while run.read():
                if handled < interrupts:
                    handled += 1
                    run.interrupt(first=handled == 1)
            # One that came last: the processes have ended.
            if handled < interrupts:
                watcher.interrupted()
            return run.process.wait()
    finally:
        run.close()


class _Run:
    def __init__(self, words: Sequence[str], env: dict[str, str], log: Path, watcher: Watcher) -> None:
        self.watcher = watcher
        self.log = _Log(log)
        # torchrun makes a folder for logs that we do not ask for, and leaves it.
        self._folder = tempfile.TemporaryDirectory(prefix="nemotron3-", ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            words,
            env={"PET_LOG_DIR": self._folder.name, **env, CONTROL: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # the terminal's signals do not reach them
        )
        assert self.process.stdin and self.process.stdout
        self._control, self._output = self.process.stdin, self.process.stdout
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._rest = b""
        self._stopping = False
        self._deadline: float | None = None
        self._ending: list[psutil.Process] = []

    def read(self) -> bool:
        """Read what the processes have printed, for a moment; return False once they have ended."""
        if self._poll.poll(int(INTERVAL * 1000)):
            data = os.read(self._output.fileno(), 1 << 16)
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._line(line + b"\n")
        if self._stopping and self.watcher.finished:
            self.end()
        if self.process.poll() is not None:
            self.end()  # ranks whose agent has been killed
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._kill()
            return self.process.poll() is None
        return True

    def interrupt(self, first: bool) -> None:
        with self._mute():
            save = self.watcher.interrupted()
            self._stopping = True
        if not first or not save:
            self.end()
        elif self._deadline is None:
            with contextlib.suppress(BrokenPipeError):  # they have just ended
                self._control.write(b"s")

    def end(self) -> None:
        """Close the control pipe, which ends the processes; `PATIENCE` later they are killed."""
        if self._deadline is None:
            self._ending = descendants(self.process.pid)
            self._deadline = time.monotonic() + PATIENCE
            self._control.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.close()
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        self._kill()
        self.process.wait()
        self._folder.cleanup()
        self._output.close()
        if self._rest:
            self.log.write(self._rest)
        self.log.close()

    def _line(self, line: bytes) -> None:
        self.log.write(line)
        with self._mute():
            self.watcher.line(line.decode("utf-8", "replace"))

    @contextlib.contextmanager
    def _mute(self) -> Iterator[None]:
        """If nothing can be printed any more, discard the output, save and leave."""
        try:
            yield
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
            if not self._stopping:
                self.interrupt(first=True)

    def _kill(self) -> None:
        """Kill the processes that have not ended."""
        if self.process.poll() is None:
            self.process.kill()
        import psutil

        for process in self._ending:
            with contextlib.suppress(psutil.Error):  # it has ended
                process.kill()


class _Log:
    """A log file to append to. A disk that is full does not end the run that writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: Any = path.open("ab", buffering=0)
        self._complete = True

    def write(self, line: bytes) -> None:
        try:
            self._file.write(line)
        except OSError as problem:
            if self._complete:
                print(f"{self.path} is incomplete: {problem.strerror}", flush=True)
            self._complete = False

    def close(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()


#: Bytes of one process that has imported torch and Megatron 0.19 (measured, CPU).
PROCESS = int(0.7 * 2**30)
_GIB = 2**30
#: (limit, usage) of the control group, version 2 and 1.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def cores() -> int:
    """Number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that new processes can use, by machine and control group."""
    import psutil

    found = [psutil.virtual_memory().available]
    for limit, usage in _GROUPS:
        try:
            found.append(int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):  # "max": no limit
            continue
    return max(0, min(found))


def needed_memory(launch: Launch) -> int:
    """Bytes of all ranks on a CPU: Megatron itself, weights, optimizer, activations."""
    layout, share = launch.layout, RankShare.of(launch, lora=in_environment())
    stage_ranks = layout.world_size // layout.pp
    held = (memory(launch, stage, share=share).total for stage in range(layout.pp))
    return sum(stage_ranks * (PROCESS + one) for one in held)


def shortages(launch: Launch) -> list[str]:
    """Return a sentence for each of cores and memory that all ranks together exceed on this machine's CPU."""
    ranks, have, found = launch.layout.world_size, cores(), []
    if ranks > have:
        found.append(f"{ranks} ranks share {have} cores: each rank gets {have / ranks:.2f} of a core at most")
    free, need = free_memory(), needed_memory(launch)
    if need > free:
        found.append(
            f"{ranks} ranks need about {need / _GIB:.1f} GiB of memory ({PROCESS / _GIB:.1f} GiB each for "
            f"Megatron itself), and {free / _GIB:.1f} GiB are free: use fewer ranks, a smaller model or batch"
        )
    return found
