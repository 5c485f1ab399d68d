"""The frame of every benchmark: the model, sides in processes of their own that take turns, memory, tables.

Every side of a comparison runs in a process of its own (`Worker`), so that memory can be attributed to it.
The parent process calls the sides alternately, so that other load on the machine affects all of them alike.
On a busy machine set OMP_WAIT_POLICY=passive: OpenMP threads that spin while they wait for a core make a step
ten times slower.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from process_tree import proc_bytes

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    # `python benchmarks/x.py` finds the package and tests.support.
    sys.path.insert(0, str(ROOT))

MIB, GIB = 2**20, 2**30
#: Variable that names the file for the rows of a stage of gpu.py.
ROWS = "NEMOTRON3_BENCHMARK_ROWS"


def model(pattern: str = "MEMEM*EMEME") -> Any:
    """The benchmarks' `Nemotron3Config`: the family's proportions at hidden size 256.

    Mamba: inner width 2 * 256, head dimension 64 and state 128 as published; 2 groups instead of 8, so that
    a group still serves several heads (4; published: 8 to 32). Latent 1/4 of the hidden size, shared expert
    twice a routed one, 32 experts, top-6.
    """
    from megatron_nemotron3.models import Nemotron3Config

    return Nemotron3Config(
        name="benchmark",
        title="Nemotron 3 proportions at hidden size 256",
        pattern=pattern,
        hidden_size=256,
        vocab_size=2048,
        seq_length=8192,
        max_position_embeddings=8192,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        mamba_state_dim=128,
        mamba_num_groups=2,
        dense_ffn_hidden_size=1024,
        num_moe_experts=32,
        moe_router_topk=6,
        moe_ffn_hidden_size=176,
        moe_shared_expert_intermediate_size=352,
        moe_latent_size=64,
        moe_router_topk_scaling_factor=5.0,
        init_method_std=0.0559,
    )


def parser(description: str | None, *, gpu: bool = False) -> argparse.ArgumentParser:
    """A parser that prints the module's docstring as it is.

    Args:
        gpu: with the options of a stage of gpu.py.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if gpu:
        if ROWS in os.environ:
            from megatron_nemotron3.common.processes import end_with_parent

            end_with_parent(os.getppid())  # gpu.py may be killed
        made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        made.add_argument(
            "--small", action="store_true", help="tiny models: a rehearsal of a stage of gpu.py"
        )
    return made


def do_not_clamp_time_steps(module: Any) -> None:
    """Remove the lower limit of transformers' Mamba-2 time steps, which the model family does not have."""
    for part in module.modules():
        if hasattr(part, "time_step_limit"):
            part.time_step_limit = (0.0, math.inf)


def set_threads() -> None:
    """Use as many threads as OMP_NUM_THREADS says, by default two."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def seconds(function: Callable[[], Any], device: str = "cpu") -> float:
    """Time of one call in seconds; on a GPU between two events, after the queue is empty."""
    import torch

    if device == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def operations(function: Callable[[], Any], device: str, most: int) -> list[dict[str, Any]]:
    """The operations that take most time on the device, in one call."""
    import torch
    from torch.profiler import profile

    with profile() as run:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    attribute = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
    found = sorted(run.key_averages(), key=lambda event: -getattr(event, attribute))
    return [
        {"operation": e.key[:80], "calls": e.count, "ms": round(getattr(e, attribute) / 1e3, 3)}
        for e in found[:most]
    ]


def peak(function: Callable[[], Any], device: str = "cpu") -> int:
    """Largest increase of memory while `function` runs, in bytes: on a CPU that of resident memory.

    Freed memory is returned to the system first, and the high-water mark is reset, so the result does not
    depend on what ran before.
    """
    import torch

    gc.collect()
    if device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
        reset_peak()
        before = proc_bytes("self/status")["VmRSS"]
        function()
        return max(0, proc_bytes("self/status")["VmHWM"] - before)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - idle)


def reset_peak() -> None:
    """Reset the kernel's high-water mark of this process's resident memory (VmHWM)."""
    Path("/proc/self/clear_refs").write_text("5")


class Worker:
    """An object in a process of its own; `call` runs one of its methods there.

    Args:
        factory: module-level callable that creates the object, called in the new process by the first call.
    """

    def __init__(self, factory: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, args), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """Return the method's result. Raises RuntimeError if it fails or the process dies."""
        self._pipe.send((method, args))
        try:
            fine, result = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"the process died in {method}{args}, likely out of memory") from error
        if not fine:
            raise RuntimeError(result)
        return result

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    set_threads()
    served = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            served = served or factory(*args)
            pipe.send((True, getattr(served, method)(*arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


def in_turn(calls: Sequence[Callable[[], float]], repetitions: int) -> list[float]:
    """Median result of each call; the calls run alternately (`rounds`)."""
    return [statistics.median(values) for values in rounds(calls, repetitions)]


def rounds(calls: Sequence[Callable[[], T]], repetitions: int) -> list[list[T]]:
    """Results of each call. Every round runs all of them once; a first round for warm-up is discarded."""
    results: list[list[T]] = [[] for _ in calls]
    for number in range(repetitions + 1):
        for call, values in zip(calls, results, strict=True):
            value = call()
            if number:
                values.append(value)
    return results


def machine() -> str:
    """One line about the machine the figures come from."""
    import torch

    policy = os.environ.get("OMP_WAIT_POLICY", "default")
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    threads = f"{os.environ.get('OMP_NUM_THREADS', '2')} threads (wait policy {policy})"
    cpu = f"{platform.machine()}, {os.cpu_count()} CPUs"
    return f"{cpu}, {threads}, torch {torch.__version__}, load {load}"


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A Markdown table of rows with the same keys, or nothing without rows."""
    made = list(rows)
    if not made:
        return []
    cells = [list(made[0]), *([text(value) for value in row.values()] for row in made)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        lines.append("| " + " | ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) + " |")
    return [lines[0], "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|", *lines[1:]]


def text(value: Any) -> str:
    """A cell: three significant digits, or what was formatted before."""
    if isinstance(value, float):
        digits = max(0, 2 - math.floor(math.log10(abs(value)))) if math.isfinite(value) and value else 0
        return f"{value:,.{digits}f}" if digits < 6 else f"{value:.1e}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value).replace("|", "/")


def show(rows: Iterable[Mapping[str, Any]], kind: str = "row") -> None:
    """Print a table, and emit its rows."""
    made = list(rows)
    print("\n".join(table(made)), flush=True)
    for row in made:
        emit(kind, row)


def emit(kind: str, row: Mapping[str, Any]) -> None:
    """Add a row to the file of the stage of gpu.py that this process runs; elsewhere nothing happens."""
    if path := os.environ.get(ROWS):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **row}) + "\n")
