"""Ranks on the CPU: processes forked from one server that has imported what they need, and a gloo world.

The server is multiprocessing's and inherits no memory of this process. It starts with the first ranks and
imports the modules of `preload`, which takes seconds. Later ranks start at once.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from megatron_nemotron3.common.processes import end_with_parent

#: A launcher describes a rank to torch.distributed and Megatron by these.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Call:
    """`function(*args)` on a rank. The function is importable by name, arguments and result are picklable."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    #: Returns the context manager around the call.
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def run_ranks(call: Call, world_size: int, *, timeout: float, preload: Sequence[str]) -> list[Any]:
    """Make a call on every rank; return the ranks' results in order.

    RANK, LOCAL_RANK and WORLD_SIZE are set. The ranks are processes of their own, without a process group
    unless the call makes one (`gloo_world`), and may start others.
    """
    context, pickled = server(preload), pickle.dumps(call)
    deadline = time.monotonic() + timeout
    ranks: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    results: dict[int, Any] = {}
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_worker, args=(sender, pickled, rank, world_size, os.getpid()))
            process.start()
            sender.close()  # so that a dead worker reads as end of file
            processes.append(process)
            ranks[receiver] = rank
        while len(results) < world_size:
            pending = [c for c, rank in ranks.items() if rank not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(set(range(world_size)) - set(results))
                raise TimeoutError(f"ranks {late} of {world_size} did not finish in {timeout} s")
            failures = []
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                when, result, error = _receive(connection, processes[rank])
                if error is None:
                    results[rank] = result
                else:
                    failures.append((when, rank, error))
            if failures:
                _, rank, error = min(failures)
                raise RuntimeError(f"rank {rank} of {world_size} failed:\n{error}")
        return [results[rank] for rank in range(world_size)]
    finally:
        _reap(processes, patience=5.0 if len(results) == world_size else 0.0)


def start_server(output: IO[str], preload: Sequence[str]) -> None:
    """Start the server now, with its output and that of the ranks in a file.

    Its imports go on while this process does other things. Without effect if it runs already.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        server(preload)
    finally:
        for descriptor, saved in zip((1, 2), before, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)


def server(preload: Sequence[str]) -> ForkServerContext:
    """Return the context of processes that are forked from the server, which runs afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_nemotron3.common.uncollected", *preload])
    # It receives sys.path only after its imports, and must not find another copy in the working directory.
    installed = _ROOT.name in ("site-packages", "dist-packages")
    path = [*([] if installed else [str(_ROOT)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with environment_kept():
        os.environ.update(PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join(path))
        forkserver.ensure_running()
    return context


@contextmanager
def environment_kept() -> Iterator[None]:
    """Undo afterwards what the block changes in the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def gloo_world(store: str, timeout: float) -> Iterator[None]:
    """Join torch's default process group inside the block, as RANK of WORLD_SIZE."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


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
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _receive(connection: Connection, process: BaseProcess) -> tuple[float, Any, str | None]:
    """(time, result, traceback or None) of a rank that reported or died."""
    try:
        message: tuple[float, Any, str | None] = pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(5)
        return time.monotonic(), None, f"process ended with exit code {process.exitcode}, no traceback"
    return message


def _reap(processes: list[BaseProcess], patience: float) -> None:
    """Let the processes end on their own for `patience` seconds, then end them."""
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for end in (BaseProcess.terminate, BaseProcess.kill):
        for process in processes:
            if process.is_alive():
                end(process)
        for process in processes:
            process.join(3)


def _worker(sender: Connection, pickled: bytes, rank: int, world_size: int, started_by: int) -> None:
    try:
        gc.freeze()
        gc.enable()
        # A killed caller cannot end it, and the server outlives the caller as long as it has children.
        end_with_parent(os.getppid(), started_by, protected=False)
        import torch

        torch.set_num_threads(1)
        call = pickle.loads(pickled)
        os.environ.clear()  # the server's is as old as the server
        os.environ.update(call.environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        with call.inside():
            try:
                message = pickle.dumps((0.0, call.function(*call.args), None))
            except BaseException:
                _report_failure(sender)  # before leaving makes other ranks fail, too
                raise
        sender.send_bytes(message)
    except BaseException:
        _report_failure(sender)


def _report_failure(sender: Connection) -> None:
    """Send the traceback, once."""
    if not sender.closed:
        sender.send_bytes(pickle.dumps((time.monotonic(), None, traceback.format_exc())))
        sender.close()
