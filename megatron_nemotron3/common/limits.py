"""Work in a forked child with limits of memory and time."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable


class ChildError(Exception):
    """No process or memory for a child. Not an OSError, which callers take for a verdict on a file."""


def in_child(work: Callable[[], object], *, memory: int, seconds: int) -> str:
    """Run `work` in a forked child with limits; "" if it returned, else why not, as the end of "it …".

    Results reach this process only through shared memory (`mmap`). The child may take `memory` bytes beyond
    what this process has, and compute for `seconds`; so it ends soon after an interrupt of this process, too.
    Raises ChildError if it cannot be started.
    """
    import resource

    import psutil

    memory = min(memory, max(psutil.virtual_memory().available // 2, 64 << 20))
    most = psutil.Process().memory_info().vms + memory
    limits = {resource.RLIMIT_AS: most, resource.RLIMIT_CPU: seconds, resource.RLIMIT_CORE: 0}
    try:
        end = mmap.mmap(-1, 1)
        child = _fork()
    except OSError as problem:
        raise ChildError(f"no process to try a pickle in: {problem.strerror}") from None
    if child == 0:
        try:
            gc.disable()  # garbage of the parent is not collected here
            faulthandler.disable()
            sys.excepthook = lambda *_: None
            sys.unraisablehook = lambda _: None
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the interpreter reports its own failures there
            for kind, limit in limits.items():
                hard = resource.getrlimit(kind)[1]
                limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
                with contextlib.suppress(ValueError, OSError):  # macOS does not limit RLIMIT_AS
                    resource.setrlimit(kind, (limit, limit))
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


def _fork() -> int:
    """Fork; again where a library refuses for a moment, as filelock does while a thread takes a lock."""
    for _ in range(200):
        with contextlib.suppress(RuntimeError):
            return os.fork()
        time.sleep(0.01)
    return os.fork()
