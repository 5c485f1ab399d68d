"""The signals that interrupt a command, and their handlers."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

#: What a terminal, a batch system or torchrun sends to a whole process group.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds from an interrupt that Python discards to the next one.
AGAIN = 0.01


@contextlib.contextmanager
def handling(signals: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    """Handle signals by `handler` inside the block; without effect outside the main thread.

    Ignored signals stay ignored: nohup ignores SIGHUP.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signum: signal.signal(signum, handler)
        for signum in signals
        if signal.getsignal(signum) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


@contextlib.contextmanager
def repeated_if_lost(interrupt: Any) -> Iterator[None]:
    """Inside the block `interrupt` is called again if Python discards its KeyboardInterrupt.

    It does so in destructors and weakref callbacks.
    """

    def discarded(problem: Any) -> None:
        if issubclass(problem.exc_type, KeyboardInterrupt):
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            sys.__unraisablehook__(problem)

    before, sys.unraisablehook = sys.unraisablehook, discarded
    try:
        yield
    finally:
        sys.unraisablehook = before
