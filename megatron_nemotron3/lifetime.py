"""When the processes of a training end: each with its parent, and none by a signal meant for another.

A rank starts processes of its own: Megatron's checkpoint writer, the server of the writer's result queue,
data loaders. Two things go wrong with them by default. A signal of the terminal or of torchrun reaches the
whole process group, so the one that asks the rank to save kills the processes that it saves with. And they
outlive a rank that is killed.

    nemotron3 train --control pipe--> torchrun's agent and ranks --parent's pid--> their children

- The control pipe is the standard input of agent and ranks. One byte in it asks the ranks to save and leave;
  its end, which comes with the death of `nemotron3 train`, ends them. Nobody reads the byte, so each sees it.
- Ranks that torchrun started end with their agent.
- A child of a rank ends when the rank has ended. Until then it ignores SIGINT, SIGHUP and SIGTERM, but for
  the SIGTERM of its parent (`Process.terminate`).

Standard library only. Without sigtimedwait (macOS) children are not protected from signals.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

#: Set where standard input is the control pipe.
CONTROL = "NEMOTRON3_CONTROL"
#: Process id of the rank whose child reads it.
PARENT = "NEMOTRON3_PARENT"
#: What a terminal, a batch system or torchrun sends to a whole process group.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: What describes a rank to torch.distributed and Megatron; a launcher sets it.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Seconds between two looks at the parent.
INTERVAL = 1.0
#: Exit status of a process that ends because its parent has ended.
ORPHANED = 1

#: This process's id if its children are to end with it, else 0.
_family = 0
_hook_registered = False


@contextlib.contextmanager
def rank() -> Iterator[None]:
    """Make this process a rank inside the block: it obeys the control pipe, and its children end with it.

    Raises:
        SystemExit: 130, after an interrupt that the block does not handle.
    """
    control = _take_control_pipe()
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if control is not None or agent is not None:
        _start(_watch, control, agent)
    with _own_signals(controlled=control is not None), _family_of_this_process():
        try:
            yield
        except KeyboardInterrupt:
            print("megatron_nemotron3.run: interrupted", file=sys.stderr)
            raise SystemExit(130) from None


def agent() -> None:
    """Make this process the agent that starts the ranks: only the control pipe ends it.

    Signals are blocked: the agent would pass them on to the ranks' whole groups, and kill the ranks 30 s
    later, in the middle of a long save.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    if CONTROL in os.environ:
        _start(_watch, 0, None, False)


def child_of(parent: int, started_by: int | None = None, *, protected: bool = True) -> None:
    """Make this process end when process `parent`, its parent, has ended, and ignore others' signals.

    Args:
        started_by: process that had the parent, multiprocessing's fork server, start this one. Then its end
            counts: a fork server lives as long as what it has started, or ends by a signal to the group.
        protected: ignore others' signals.
    """
    protected = protected and hasattr(signal, "sigtimedwait")
    if protected:
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    _start(_until_parent_ends, parent, started_by or parent, protected)


def spawned() -> None:
    """`child_of` for a process that multiprocessing has spawned; its own children end with it in turn."""
    global _family
    started_by = int(os.environ.get(PARENT) or os.getppid())
    # Another process is the parent: multiprocessing's fork server, or who adopts the orphan of a dead one.
    if os.getppid() != started_by and not _alive(started_by):
        os._exit(ORPHANED)
    _family = os.getpid()
    os.environ[PARENT] = str(_family)
    _register_hook()
    child_of(os.getppid(), started_by)
    # The manager of a queue of results imports torch with the first result, while its rank waits.
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)


@contextlib.contextmanager
def leaving_at_interrupt(name: str) -> Iterator[None]:
    """Inside the block SIGINT prints one line and ends the process with status 130: for slow imports."""

    def leave(signum: int, frame: FrameType | None) -> None:
        # Not by an exception: a module that is being imported may catch it, or raise another.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: interrupted\n".encode())
        os._exit(130)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == (
        signal.SIG_IGN
    ):
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        with importing():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Look for no garbage inside the block: imports make hardly any, and looking takes a fourth of the time.

    What exists at the end is left out of later searches, also out of the one when the process ends.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)


def _alive(pid: int) -> bool:
    """Whether a process runs; where Linux can tell, one that nobody has waited for yet does not."""
    try:
        if hasattr(os, "pidfd_open"):
            process, poll = os.pidfd_open(pid), select.poll()  # select() takes no descriptor above 1023
            try:
                poll.register(process, select.POLLIN)
                return not poll.poll(0)
            finally:
                os.close(process)
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user, or too many open files
        pass
    return True


def _start(target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True, name="lifetime").start()  # type: ignore[arg-type]


def _take_control_pipe() -> int | None:
    """Move the control pipe, if there is one, from standard input to a descriptor of its own."""
    if os.environ.pop(CONTROL, None) is None:
        return None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # the agent's mask is inherited
    pipe, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return pipe


def _watch(control: int | None, parent: int | None, asks: bool = True) -> None:
    """Wait for the end of the control pipe or of `parent`, which end this process, and for the byte."""
    poll = select.poll()
    if control is not None:
        poll.register(control, select.POLLIN if asks else 0)
    while parent is None or os.getppid() == parent:
        for descriptor, event in poll.poll(int(INTERVAL * 1000)):
            if event & ~select.POLLIN:
                os._exit(ORPHANED)
            poll.modify(descriptor, 0)  # the byte stays in the pipe: from now on only the end counts
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(ORPHANED)


def _until_parent_ends(parent: int, started_by: int, protected: bool) -> None:
    while os.getppid() == parent if started_by == parent else _alive(started_by):
        if not protected:
            time.sleep(INTERVAL)
            continue
        received = signal.sigtimedwait(GROUP_SIGNALS, INTERVAL)
        if received and received.si_signo == signal.SIGTERM and received.si_pid in (parent, started_by):
            os._exit(128 + signal.SIGTERM)
    os._exit(ORPHANED)


@contextlib.contextmanager
def _own_signals(controlled: bool) -> Iterator[None]:
    """What a rank does at SIGINT and SIGHUP inside the block.

    Under `nemotron3 train`, which decides, nothing. Else what SIGTERM does if the script handles it
    (`--exit-signal-handler`: save and leave); a second one, and one before that, is a KeyboardInterrupt.
    """
    asked = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        saves = signal.getsignal(signal.SIGTERM)
        if asked or not callable(saves):
            raise KeyboardInterrupt
        asked = True
        with contextlib.suppress(OSError):
            os.write(2, b"\ninterrupted: finishing the step, then saving; interrupt again to stop at once\n")
        saves(signal.SIGTERM, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for signum in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            before[signum] = signal.signal(signum, signal.SIG_IGN if controlled else interrupt)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _family_of_this_process() -> Iterator[None]:
    global _family
    before = _family, os.environ.get(PARENT)
    _family = os.getpid()
    os.environ[PARENT] = str(_family)
    _register_hook()
    try:
        yield
    finally:
        _family = before[0]
        if before[1] is None:
            os.environ.pop(PARENT, None)
        else:
            os.environ[PARENT] = before[1]


def _register_hook() -> None:
    global _hook_registered
    if not _hook_registered:
        os.register_at_fork(after_in_child=_after_fork)
        _hook_registered = True


def _after_fork() -> None:
    global _family
    if _family:
        parent, _family = _family, os.getpid()
        os.environ[PARENT] = str(_family)
        child_of(parent)


def single_process_environment() -> None:
    """Without torchrun, describe a world of one process on a free port."""
    if "RANK" in os.environ:
        return
    values = ("0", "0", "1", "127.0.0.1", str(free_port()))
    for name, value in zip(RANK_VARIABLES, values, strict=True):
        os.environ.setdefault(name, value)


def free_port() -> int:
    """Choose a TCP port of this machine on which a store may listen a moment later.

    It is below those that the kernel gives to connections without a port of their own, such as gloo's: one of
    them could take it before the store does.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            end = int(file.read().split()[0])
    except OSError:
        end = 32768
    for _ in range(100):
        port = random.SystemRandom().randrange(max(1024, end - 16384), max(1025, end))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
