"""Processes that end with their parent, the process tree, and forked workers.

    nemotron3 train --control pipe--> torchrun's agent and ranks --parent's pid--> their children

A byte in the control pipe makes the ranks save and leave; its end, which comes with the death of `nemotron3
train`, ends them. A signal of the terminal or of torchrun reaches the whole process group: it would kill the
processes that a rank saves with, so children of a rank ignore it, and end when the rank has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.common.interrupts import GROUP_SIGNALS, handling, repeated_if_lost
from megatron_nemotron3.common.switches import CONTROL, PARENT

if TYPE_CHECKING:
    import psutil

#: Seconds between two looks at the parent, and between two reports of a pool.
INTERVAL = 1.0
#: Exit status of a process that ends because its parent has ended.
ORPHANED = 1
#: Hidden size up to which one thread of a CPU computes faster than two (measured at 128).
NARROW = 256
THREADS = "OMP_NUM_THREADS"

#: This process's id if its children are to end with it, else 0.
_family = 0
_hook_registered = False
#: The function and the counter of a worker, inherited by fork.
_work: Any = None


@contextlib.contextmanager
def as_rank() -> Iterator[None]:
    """Make this process a rank inside the block: it obeys the control pipe, and its children end with it."""
    control = _take_control_pipe()
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if control is not None or agent is not None:
        _end_after(lambda: agent is None or os.getppid() == agent, _control_watch(control, save=True))
    before = _family, os.environ.get(PARENT)
    with _own_signals(controlled=control is not None):
        _begin_family()
        try:
            yield
        except KeyboardInterrupt:
            print("megatron_nemotron3.run: interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            _set_family(*before)


def as_agent() -> None:
    """Make this process the agent that starts the ranks: only the control pipe ends it.

    Signals are blocked: the agent would pass them on to the ranks' whole groups, and kill the ranks 30 s
    later, in the middle of a long save.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    if CONTROL in os.environ:
        _end_after(lambda: True, _control_watch(0, save=False))


def as_spawned() -> None:
    """`end_with_parent` for a process that multiprocessing has spawned; its own children end with it, too."""
    started_by = int(os.environ.get(PARENT) or os.getppid())
    # The parent may be another process: multiprocessing's fork server, or one that adopts orphans.
    if os.getppid() != started_by and not alive(started_by):
        os._exit(ORPHANED)
    _begin_family()
    end_with_parent(os.getppid(), started_by)
    # The manager of a queue of results imports torch with the first result, while its rank waits.
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)


def end_with_parent(parent: int, started_by: int | None = None, *, protected: bool = True) -> None:
    """End this process when `parent`, its parent, or `started_by` has ended.

    Until then it ignores `GROUP_SIGNALS` (not on macOS), but for the SIGTERM of these two.
    """
    starter = started_by or parent

    def receive() -> None:
        received = signal.sigtimedwait(GROUP_SIGNALS, INTERVAL)
        if received and received.si_signo == signal.SIGTERM and received.si_pid in (parent, starter):
            os._exit(128 + signal.SIGTERM)

    protected = protected and hasattr(signal, "sigtimedwait")
    if protected:
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    _end_after(
        (lambda: os.getppid() == parent) if starter == parent else (lambda: alive(starter)),
        receive if protected else (lambda: time.sleep(INTERVAL)),
    )


def alive(pid: int) -> bool:
    """Whether a process runs; False for a zombie."""
    import psutil

    try:
        os.kill(pid, 0)  # sends nothing; /proc may hide the processes of others
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
    except (psutil.Error, OSError):  # of another user, or too many open files
        return True


def descendants(pid: int) -> list[psutil.Process]:
    """List the children of a process and theirs; none if it has ended."""
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


@contextlib.contextmanager
def exit_at_interrupt(name: str) -> Iterator[None]:
    """Inside the block handled `GROUP_SIGNALS` print a line and end with 128 + number: for slow imports."""

    def leave(signum: int, frame: FrameType | None) -> None:
        # Not by an exception: a module that is being imported may catch it, or raise another.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: interrupted\n".encode())
        os._exit(128 + signum)

    # A rank leaves SIGTERM to Megatron, which handles it after its imports.
    handled = [signum for signum in GROUP_SIGNALS if callable(signal.getsignal(signum))]
    with handling(handled, leave), no_garbage_collection():
        yield


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector during imports: it takes a fourth of the time and finds hardly anything.

    Objects that exist at the end are left out of later collections, also out of the one at exit.
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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread of torch, where it is imported.

    Threads wait for each other after every short operation, which costs more than they save, and far more
    where other processes compute, too.
    """
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def bulk_work() -> Iterator[None]:
    """Work through many tensors in a stream: without the garbage collector, and in one thread of torch.

    The collector would walk again and again through objects that are many and stay.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        with one_thread():
            yield
    finally:
        if collected:
            gc.enable()


def parallel_map(
    work: Callable[[Any, Callable[[int], None]], Any],
    items: Sequence[Any],
    *,
    workers: int,
    report: Callable[[int], None] = lambda done: None,
) -> Iterator[Any]:
    """Yield the results of `work(item, count)` for every item, in the order in which they finish.

    `work` adds to the total that `report` receives by calls of `count`.
    """
    if workers > 1 and len(items) > 1 and _can_share():
        yield from _pool_map(work, items, min(workers, len(items)), report)
        return
    done, last = 0, time.monotonic()

    def count(length: int) -> None:
        nonlocal done, last
        done += length
        if time.monotonic() - last > INTERVAL:
            last = time.monotonic()
            report(done)

    for item in items:
        yield work(item, count)
    report(done)


def ordered_map(work: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    """Yield each item and `work(item)` in the items' order; two items per worker are taken ahead."""
    if not _can_share():
        yield from ((item, work(item)) for item in items)
        return
    waiting: deque[Any] = deque()
    with _pool(lambda item, _: work(item), workers) as (pool, _):
        for item in items:
            waiting.append((item, pool.submit(_run_item, item)))
            if len(waiting) > 2 * workers:
                before, result = waiting.popleft()
                yield before, result.result()
        for item, result in waiting:
            yield item, result.result()


def _can_share() -> bool:
    """Whether processes can share a number: not where /dev/shm is missing, read-only or full."""
    import multiprocessing

    try:
        multiprocessing.get_context("fork").Value("q", 0)
    except OSError:
        return False
    return True


def _pool_map(
    work: Callable[[Any, Callable[[int], None]], Any],
    items: Sequence[Any],
    workers: int,
    report: Callable[[int], None],
) -> Iterator[Any]:
    from concurrent.futures import FIRST_COMPLETED, wait

    with _pool(work, workers) as (pool, counter):
        last, pending = time.monotonic(), {pool.submit(_run_item, item) for item in items}
        while pending:
            finished, pending = wait(pending, INTERVAL, FIRST_COMPLETED)
            for one in finished:
                yield one.result()
            now = time.monotonic()
            if now - last > INTERVAL or not pending:
                last = now
                report(counter.value)


@contextlib.contextmanager
def _pool(work: Callable[[Any, Callable[[int], None]], Any], workers: int) -> Iterator[tuple[Any, Any]]:
    """Forked processes for `_run_item`, and the counter of their work."""
    global _work
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    _work = (work, counter)
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (os.getpid(),))
    try:
        yield pool, counter
    except BrokenProcessPool:
        raise ValueError("a worker was killed (out of memory?): use fewer --workers, or cores") from None
    except BaseException:
        for worker in set(multiprocessing.active_children()) - set(others):
            worker.terminate()  # at once, not with the file that it writes
        raise
    finally:
        _work = None
        pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    gc.freeze()  # garbage of the parent is not collected here: a process group among it would hang
    end_with_parent(parent)
    if (torch := sys.modules.get("torch")) is not None:  # its threads do not survive a fork
        torch.set_num_threads(1)


def _run_item(item: Any) -> Any:
    work, counter = _work

    def count(length: int) -> None:
        with counter.get_lock():
            counter.value += length

    return work(item, count)


def _end_after(lives: Callable[[], bool], wait: Callable[[], None]) -> None:
    """Start the thread that ends this process once `lives` is False; `wait` takes at most `INTERVAL`."""

    def watch() -> None:
        while lives():
            wait()
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


def _take_control_pipe() -> int | None:
    """Move the control pipe, if there is one, from standard input to another descriptor."""
    if os.environ.pop(CONTROL, None) is None:
        return None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # the agent's mask is inherited
    pipe, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return pipe


def _control_watch(control: int | None, save: bool) -> Callable[[], None]:
    """Return a function that polls the control pipe for its end, and for the byte if that is to `save`."""
    poll = select.poll()
    if control is not None:
        poll.register(control, select.POLLIN if save else 0)

    def wait() -> None:
        for descriptor, event in poll.poll(int(INTERVAL * 1000)):
            if event & ~select.POLLIN:
                os._exit(ORPHANED)
            poll.modify(descriptor, 0)  # the byte stays in the pipe: from now on wait for the end only
            os.kill(os.getpid(), signal.SIGTERM)

    return wait


@contextlib.contextmanager
def _own_signals(controlled: bool) -> Iterator[None]:
    """Handle a rank's SIGINT and SIGHUP inside the block: the first saves, the second interrupts."""
    interrupted, before = False, signal.getsignal(signal.SIGTERM)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        saves = signal.getsignal(signal.SIGTERM)
        if interrupted or saves == before or not callable(saves):
            raise KeyboardInterrupt
        interrupted = True
        with contextlib.suppress(OSError):
            os.write(2, b"\ninterrupted: finishing the step, then saving; interrupt again to stop at once\n")
        saves(signal.SIGTERM, frame)

    handler = signal.SIG_IGN if controlled else interrupt
    with repeated_if_lost(interrupt), handling((signal.SIGINT, signal.SIGHUP), handler):
        yield


def _begin_family() -> None:
    """From now on children made by fork end with this process."""
    global _hook_registered
    _set_family(os.getpid(), str(os.getpid()))
    if not _hook_registered:
        os.register_at_fork(after_in_child=_after_fork)
        _hook_registered = True


def _set_family(family: int, variable: str | None) -> None:
    global _family
    _family = family
    if variable is None:
        os.environ.pop(PARENT, None)
    else:
        os.environ[PARENT] = variable


def _after_fork() -> None:
    if parent := _family:
        _set_family(os.getpid(), str(os.getpid()))
        end_with_parent(parent)
