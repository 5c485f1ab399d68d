"""The process of the `nemotron3` command: an interrupt at any moment ends it with one line."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

INTERRUPTED = 130
#: Seconds that an interrupted import has to end; some packages swallow KeyboardInterrupt.
PATIENCE = 1.0

#: Seconds from an interrupt that Python discards to the next one.
AGAIN = 0.01

_interrupted = False
#: Whether the command has returned: an exception would not be caught any more.
_ended = False


def _leave(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    if _ended:
        _leave(signum, frame)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, _leave)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            break
        frame = frame.f_back
    raise KeyboardInterrupt


def _discarded(problem: Any) -> None:
    """Interrupt again: Python drops exceptions in destructors and weakref callbacks, a handler's, too."""
    if problem.exc_type is KeyboardInterrupt:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
    else:
        sys.__unraisablehook__(problem)


def main() -> int:
    """Run the command line in `sys.argv`; return its exit status."""
    global _ended
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in the background of a shell script
    if not ignored:
        signal.signal(signal.SIGINT, _leave)
    from megatron_nemotron3.common.processes import exit_at_interrupt

    with exit_at_interrupt("nemotron3"):
        from megatron_nemotron3 import cli

    if not ignored:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _discarded
    try:
        return cli.main()
    except BaseException:
        if not _interrupted:
            raise
        print("interrupted", file=sys.stderr)  # whatever an import made of it
        return INTERRUPTED
    finally:
        _ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not ignored:
            signal.signal(signal.SIGINT, _leave)


if __name__ == "__main__":
    raise SystemExit(main())
