"""Map a function over items in forked processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from threading import Thread
from typing import Any

#: Seconds between two reports.
INTERVAL = 1.0

#: The function and the counter of a worker, inherited by fork.
_work: tuple[Callable[[Any, Callable[[int], None]], Any], Any]


def parallel_map(
    work: Callable[[Any, Callable[[int], None]], Any],
    items: Sequence[Any],
    *,
    workers: int,
    report: Callable[[int], None] = lambda done: None,
) -> Iterator[Any]:
    """Yield the results of `work(item, count)` for every item, in the order in which they finish.

    Args:
        work: any function, since processes are forked. It calls `count` with the bytes of each step. Items
            and results are pickled.
        workers: number of processes; 1: this process does the work.
        report: called with the bytes counted by all, every second and at the end.

    Raises:
        ValueError: a worker was killed.
    """
    global _work
    last = time.monotonic()
    if workers == 1 or len(items) <= 1:
        done = 0

        def count(length: int) -> None:
            nonlocal done, last
            done += length
            if time.monotonic() - last > INTERVAL:
                last = time.monotonic()
                report(done)

        for item in items:
            yield work(item, count)
        report(done)
        return
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    _work = (work, counter)
    pipe = os.pipe()
    pool, ends = ProcessPoolExecutor(min(workers, len(items)), context, _end_with_parent, pipe), [*pipe]
    try:
        pending = {pool.submit(_run_item, item) for item in items}
        while pending:
            finished, pending = wait(pending, INTERVAL, FIRST_COMPLETED)
            for one in finished:
                yield one.result()
            now = time.monotonic()
            if now - last > INTERVAL or not pending:
                last = now
                report(counter.value)
    except BrokenProcessPool:
        raise ValueError("a worker was killed (out of memory?): try again with fewer --workers") from None
    except BaseException:
        _close(ends)  # workers end at once, not with the file that they write
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        _close(ends)


def _close(ends: list[int]) -> None:
    while ends:
        os.close(ends.pop())


def _end_with_parent(read: int, write: int) -> None:
    """End this worker when its parent dies, so that it does not write while a new command continues.

    Only the parent keeps the write end of the pipe open, so reading returns as soon as the parent is dead.
    """
    gc.freeze()  # what is garbage of the parent is not collected here: a process group among it would hang
    os.close(write)
    # Ctrl-C reaches the whole group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def wait() -> None:
        os.read(read, 1)
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _run_item(item: Any) -> Any:
    work, counter = _work

    def count(length: int) -> None:
        with counter.get_lock():
            counter.value += length

    return work(item, count)
