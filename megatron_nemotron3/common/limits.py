"""Work in forked children with limits of memory and time: once, or by requests."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

#: Bytes and seconds of one core to read a text or a file of others: a right one takes a hundredth of it.
MEMORY, SECONDS = 768 << 20, 5

T = TypeVar("T")


class ChildError(Exception):
    """No process or memory for a child. Not an OSError, which callers take for a verdict on a file."""


def in_child(work: Callable[[], object], *, memory: int, seconds: int) -> str:
    """Run `work` in a forked child with limits; "" if it returned, else why not, as the end of "it …".

    Results reach this process only through shared memory (`mmap`). The child may take `memory` bytes beyond
    what this process has, and compute for `seconds`; so it ends soon after an interrupt of this process, too.
    Raises ChildError if it cannot be started.
    """
    memory, most = _address_space(memory)
    try:
        end = mmap.mmap(-1, 1)
        child = _fork()
    except OSError as problem:
        raise ChildError(f"no process to try a pickle in: {problem.strerror}") from None
    if child == 0:
        try:
            gc.disable()  # garbage of the parent is not collected here
            _begin(most, seconds)
            work()
            end[0] = 1
        except MemoryError:
            end[0] = 2
        finally:
            os._exit(0)
    status, time_used, deadline = 0, 0.0, time.monotonic() + 20 * seconds
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored
        while (done := os.wait4(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:  # a lock that another thread held at the fork
                os.kill(child, signal.SIGKILL)
            time.sleep(0.0005)
        _, status, used = done
        time_used = used.ru_utime + used.ru_stime
    if end[0]:
        return f"needs more than {memory >> 20:,} MiB of memory" if end[0] == 2 else ""
    if time_used > seconds - 0.5:
        return f"takes more than {seconds:,} s to read"
    return "ends the process that reads it" + (f" (signal {os.WTERMSIG(status)})" if status else "")


class LimitError(ValueError):
    """A request needs more than its limits. The message is the end of "it …"."""


def limited(work: Callable[[], T], what: str) -> T:
    """`work()` in a forked child with `MEMORY` and `SECONDS`; `what` is the subject of "… takes more than …".

    Raises:
        ValueError: it takes more, and what `work` raises.
        ChildError: no child can be started.
    """

    def answer(_: bytes) -> bytes:
        try:
            return pickle.dumps((work(), None))
        except MemoryError:
            raise
        except BaseException as problem:  # a library in Rust raises a PanicException, which is no Exception
            known = isinstance(problem, Exception)
            return pickle.dumps((None, problem if known else ValueError(f"{what}: {problem}")))

    child = LimitedChild(answer, memory=MEMORY, seconds=SECONDS)
    try:
        result, problem = pickle.loads(child.ask(b""))
    except LimitError as exceeded:
        raise ValueError(f"{what} {exceeded}, the most that its reading may take") from None
    finally:
        child.close()
    if problem is not None:
        raise problem
    return result


class LimitedChild:
    """A forked child that answers requests, one after the other. After one that ends it there is a new one.

    Args:
        answer: computes in the child; it raises nothing but MemoryError.
        memory: bytes that the child may take beyond what this process has.
        seconds: what it may compute for a request.
    """

    def __init__(self, answer: Callable[[bytes], bytes], *, memory: int, seconds: int) -> None:
        self._answer, self._memory, self._seconds = answer, memory, seconds
        #: Bytes that the present child may take: less than `memory` where less was available at its start.
        self._limit = memory
        self._pipe: Any = None
        self._child = self._owner = 0

    def ask(self, request: bytes) -> bytes:
        """The answer to a request. Raises LimitError, or ChildError if no child can be started."""
        if self._owner != os.getpid():  # of a fork of the process that started it
            self._start()
        deadline, timeout = time.monotonic() + 20 * self._seconds, f"takes more than {self._seconds} s"
        try:
            self._pipe.send_bytes(request)
            while not self._pipe.poll(1):
                if time.monotonic() > deadline:
                    os.kill(self._child, signal.SIGKILL)
            answer: bytes = self._pipe.recv_bytes()
            return answer
        except (EOFError, ConnectionError):
            _, status = os.waitpid(self._child, 0)
            self._owner = 0
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGABRT
        if ended in (signal.SIGXCPU, signal.SIGKILL):
            raise LimitError(timeout)
        if ended != signal.SIGABRT:  # a library that gets no memory aborts
            raise LimitError(f"ends the process that computes it (signal {ended})")
        raise LimitError(f"needs more than {self._limit >> 20:,} MiB of memory")

    def close(self) -> None:
        """End the child."""
        if self._owner == os.getpid():
            self._owner = 0
            self._pipe.close()
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)  # a later child has a copy of the pipe
                os.waitpid(self._child, 0)

    def __del__(self) -> None:
        self.close()

    def _start(self) -> None:
        from multiprocessing import Pipe

        self._limit, most = _address_space(self._memory)
        try:
            self._pipe, theirs = Pipe()
            self._child = _fork()
        except OSError as problem:
            raise ChildError(f"no process to compute in: {problem.strerror}") from None
        if self._child == 0:
            try:
                self._pipe.close()
                gc.freeze()  # garbage of the parent is not collected here
                for name, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.SIG_IGN)):
                    signal.signal(name, handler)  # an interrupted parent closes the pipe
                _begin(most, None)
                while True:
                    request = theirs.recv_bytes()
                    _limit_seconds(self._seconds)
                    theirs.send_bytes(self._answer(request))
            finally:
                os._exit(0)
        theirs.close()
        self._owner = os.getpid()


def _address_space(memory: int) -> tuple[int, int]:
    """Bytes that a child may take beyond this process, at most `memory`, and all of its address space."""
    try:
        import psutil
    except ImportError:  # the package without its extras: the child has its limit of time alone
        return memory, -1
    memory = min(memory, max(psutil.virtual_memory().available // 2, 64 << 20))
    return memory, psutil.Process().memory_info().vms + memory


def _begin(most: int, seconds: int | None) -> None:
    """Set the limits of a child, and let it report nothing."""
    import resource

    faulthandler.disable()
    sys.excepthook = lambda *_: None
    sys.unraisablehook = lambda _: None
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the interpreter reports its own failures there
    limits = {resource.RLIMIT_AS: most, resource.RLIMIT_CORE: 0}
    if seconds is not None:
        limits[resource.RLIMIT_CPU] = seconds
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS does not limit RLIMIT_AS
            resource.setrlimit(kind, (limit, limit))


def _limit_seconds(seconds: int) -> None:
    """Let this process compute so long from now; then SIGXCPU ends it."""
    import resource

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard < 0 else min(limit, hard), hard))


def _fork() -> int:
    """Fork; again where a library refuses for a moment, as filelock does while a thread takes a lock."""
    for _ in range(200):
        with contextlib.suppress(RuntimeError):
            return os.fork()
        time.sleep(0.01)
    return os.fork()
