"""The process of the `nemotron3` command: an interrupt or an exception ends it with one line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

#: Status of an interrupt that is handled, whatever its signal.
INTERRUPTED = 130
#: Seconds that an interrupted import has to end; some packages swallow KeyboardInterrupt.
PATIENCE = 1.0

#: Number of the signal that interrupted the command; 0: none.
_interrupted = 0
#: Whether the command has returned: an exception would not be caught any more.
_ended = False
#: The process of the command. Its children inherit the handlers until they set their own.
_process = os.getpid()


class _Interrupt(KeyboardInterrupt):
    """The interpreter would end by SIGINT, without a status, if C code met KeyboardInterrupt itself."""


def _say() -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, b"interrupted\n")


def _leave(signum: int, frame: FrameType | None) -> None:
    if os.getpid() == _process:
        _say()
    os._exit(128 + (_interrupted or signum))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _interrupted
    if signum != signal.SIGALRM:  # one that comes again
        _interrupted = _interrupted or signum
    if _ended or os.getpid() != _process:
        _leave(signum, frame)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, _leave)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            break
        frame = frame.f_back
    raise _Interrupt


def _unnamed(problem: BaseException) -> int:
    """Say in one line what no command has a message for, and return 2; `run` shows what its script raises."""
    failed = isinstance(problem, Exception) or type(problem).__name__ == "PanicException"  # of PyO3
    if not failed or sys.argv[1:2] == ["run"] or sys.flags.dev_mode:  # PYTHONDEVMODE=1
        raise problem
    import traceback

    from megatron_nemotron3.cli.table import command_of
    from megatron_nemotron3.common.files import printable

    kinds: dict[type, str] = {MemoryError: "not enough memory", RecursionError: "a file is nested too deeply"}
    text = " ".join(f"{type(problem).__name__}: {problem!s:.300}".split())
    where = traceback.extract_tb(problem.__traceback__)[-1]
    place = f"{os.path.basename(where.filename)}, line {where.lineno}"
    line = f"{kinds.get(type(problem), text)} ({place}; PYTHONDEVMODE=1 prints the traceback)"
    print(f"nemotron3 {command_of(sys.argv[1:])}: {printable(line)}", file=sys.stderr)
    return 2


def main() -> int:
    """Run the command line in `sys.argv`; return its status: 2 after an exception, 128 + N after signal N."""
    global _ended
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # As SIGINT is in the background of a shell script, and SIGHUP after nohup.
    signals = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]
    for signum in signals:
        signal.signal(signum, _leave)
    from megatron_nemotron3.common.interrupts import repeated_if_lost
    from megatron_nemotron3.common.processes import exit_at_interrupt

    with exit_at_interrupt("nemotron3"):
        from megatron_nemotron3 import cli

    for signum in signals:
        signal.signal(signum, _interrupt)
    try:
        with repeated_if_lost(_interrupt):
            status = cli.main()
        return 128 + _interrupted if _interrupted and status == INTERRUPTED else status
    except BaseException as end:
        if not _interrupted:
            return _unnamed(end)
        if not isinstance(end, SystemExit) or end.code != INTERRUPTED:  # it has been said
            _say()  # whatever an import made of it
        return 128 + _interrupted
    finally:
        _ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum in signals:
            signal.signal(signum, _leave)


if __name__ == "__main__":
    raise SystemExit(main())
