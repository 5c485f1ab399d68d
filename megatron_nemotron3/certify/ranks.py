"""Call a function on every rank of a small world on the CPU. Needs torch and megatron-core.

It is a module-level function, because worker processes import it by name:

    def check(width):
        initialize(tp=2)
        model = build_hybrid("M*", nemotron3_torch_stack_spec, hidden_size=width)
        ...
        return something_picklable

    first, second = run_distributed(check, 2, 64)
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

#: What the server imports that workers are forked from.
PRELOAD = ["megatron_nemotron3.certify.preload"]
_ROOT = Path(__file__).parents[2]


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    apart: bool = False,
    children: bool = False,
) -> list[Any]:
    """Call `function(*args)` on every rank of a gloo world on the CPU; return the ranks' results in order.

    Each rank runs inside `cpu_mode` with torch.distributed initialized; `initialize` makes Megatron's
    groups. Ranks are processes of their own, forked from a server that has imported Megatron and holds
    nothing of this process; a world of one runs right here and is taken down again. `function` must be
    importable by name, arguments and results picklable.

    Args:
        timeout: seconds, imports included; not for a world of one right here.
        apart: a process of its own for a world of one, too. Megatron's DistributedDataParallel is never
            freed, and with it stay some sixty gloo threads, which poll.
        children: the ranks start processes of their own (Megatron's checkpoint writer).

    Raises:
        RuntimeError: a rank failed; the message has the traceback of the one that failed first.
        TimeoutError: some rank did not finish. Either way no process is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        if world_size == 1 and not apart:
            with _environment_kept(), _rank(0, 1, store, timeout):
                return [function(*args)]
        call = pickle.dumps((function, args, dict(os.environ)))
        return start_ranks(call, world_size, store, timeout, daemon=not children)


def run_fresh(function: Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
    """Call `function(*args)` in a process of its own that has imported Megatron and nothing else.

    As `run_distributed`, without CPU mode and without a world.
    """
    return start_ranks(pickle.dumps((function, args, dict(os.environ))), 1, None, timeout, daemon=False)[0]


def start_server(output: IO[str]) -> None:
    """Start the server now, so that whatever it and the ranks print goes to a file.

    Its imports go on while this process does other things. Without effect if it runs already.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        server()
    finally:
        for descriptor, saved in zip((1, 2), before, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)


def server() -> ForkServerContext:
    """The context of processes that are forked from a server with `PRELOAD`, which runs afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # It gets the module path after its imports, and must not find another copy in the working directory.
    installed = _ROOT.name in ("site-packages", "dist-packages")
    path = [*([] if installed else [str(_ROOT)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with _environment_kept():
        os.environ.update(PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join(path))
        forkserver.ensure_running()
    return context


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo afterwards what the block changes in the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start_ranks(call: bytes, world_size: int, store: str | None, timeout: float, daemon: bool) -> list[Any]:
    context = server()
    deadline = time.monotonic() + timeout
    ranks: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    results: dict[int, Any] = {}
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker,
                args=(sender, call, rank, world_size, store, timeout, os.getpid()),
                daemon=daemon,
            )
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


def _worker(
    sender: Connection,
    call: bytes,
    rank: int,
    world_size: int,
    store: str | None,
    timeout: float,
    started_by: int,
) -> None:
    try:
        from megatron_nemotron3 import lifetime

        # A killed caller cannot end it, and the server outlives the caller as long as it has children.
        lifetime.child_of(os.getppid(), started_by, protected=False)
        import torch

        torch.set_num_threads(1)
        function, args, environment = pickle.loads(call)
        os.environ.clear()  # the server's is as old as the server
        os.environ.update(environment)
        if store is None:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        with nullcontext() if store is None else _rank(rank, world_size, store, timeout):
            try:
                message = pickle.dumps((0.0, function(*args), None))
                if store is not None:
                    torch.distributed.barrier()  # nobody leaves while another still talks to it
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


@contextmanager
def _rank(rank: int, world_size: int, store: str, timeout: float) -> Iterator[None]:
    """Be one rank: CPU mode, environment, process group; afterwards none of it is left."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from megatron_nemotron3.cpu import cpu_mode

    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}.items():
        os.environ[name] = str(value)
    with cpu_mode(), torch.random.fork_rng(devices=[]):
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        try:
            yield
        finally:
            destroy_moe_metrics_tracker()
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def initialize(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    vpp: int | None = None,
    seed: int = 1234,
    optimizer_instances: int = 1,
) -> None:
    """Make Megatron's process groups (data parallel: what is left) and seed its RNG streams.

    Sequence parallelism is no group: `build_hybrid` turns it on where TP > 1.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=optimizer_instances,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
