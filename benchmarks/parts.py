"""CPU time of a training step of our torch model by part, on one thread.

    OMP_NUM_THREADS=1 python benchmarks/parts.py [--lengths 512 8192]

Model and step are those of train_step.py. Hand-written autograd functions, router and dispatch are timed as a
whole. All other torch operations are timed individually in a second pass, because that adds overhead. One
thread and CPU time make the result robust against other load on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common import machine, print_table
from train_step import Ours

#: Operation of torch -> row of the table.
OPERATIONS = {
    "mm": "dense products",
    "addmm": "dense products",
    "bmm": "dense products",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
}


class Clock:
    """CPU seconds by name; what runs inside something clocked counts there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside = False

    def wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function`, clocked."""

        def clocked(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside, start = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - start
                self.inside = False

        return clocked


def clock_parts(clock: Clock) -> None:
    """Put the clock on our autograd functions and on Megatron's router and dispatcher, for this process."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_nemotron3.layers import chunked_scan, conv, functional, grouped

    parts = {
        "scan": [chunked_scan.ChunkedScan],
        "convolution": [conv._CausalConv],
        "norms": [functional._RMSNorm],
        "experts": [grouped._Experts],
    }
    for name, functions in parts.items():
        for function in functions:
            function.forward = staticmethod(clock.wrap(function.forward, name))  # type: ignore[method-assign]
            function.backward = staticmethod(clock.wrap(function.backward, name))  # type: ignore[method-assign]
    TopKRouter.forward = clock.wrap(TopKRouter.forward, "router and dispatch, forward")
    for name in ("preprocess", "token", "postprocess"):
        for way in ("dispatch", "combine"):
            method = f"{way}_{name}" if name != "token" else f"token_{way}"
            own = getattr(MoEAlltoAllTokenDispatcher, method)
            clocked = clock.wrap(own, "router and dispatch, forward")
            setattr(MoEAlltoAllTokenDispatcher, method, clocked)


def by_part(side: Ours, clock: Clock, length: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of a step by row."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            row = OPERATIONS.get(func.__name__.split(".")[0], "other operations")
            return clock.wrap(func, row)(*args, **(kwargs or {}))

    def run(look: bool) -> tuple[float, dict[str, float]]:
        side.step(length)
        clock.seconds.clear()
        start = time.process_time()
        for _ in range(repetitions):
            if look:
                with Look():
                    side.step(length)
            else:
                side.step(length)
        total = (time.process_time() - start) / repetitions * 1e3
        return total, {name: s / repetitions * 1e3 for name, s in clock.seconds.items()}

    total, rows = run(look=False)
    rows |= {name: ms for name, ms in run(look=True)[1].items() if name not in rows}
    rest = total - sum(rows.values())
    return {
        **dict(sorted(rows.items(), key=lambda row: -row[1])),
        "Python and autograd": rest,
        "whole step": total,
    }


def peak_gflops() -> float:
    """GFLOP/s of a product of 1024 x 1024 matrices."""
    import torch

    a = torch.randn(1024, 1024)
    a @ a
    start = time.thread_time()
    for _ in range(5):
        a @ a
    return 5 * 2 * 1024**3 / (time.thread_time() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print(f"{machine()}; one thread used; large product {peak_gflops():.0f} GFLOP/s", flush=True)
    side, clock = Ours(), Clock()
    clock_parts(clock)
    columns = [by_part(side, clock, length, args.repetitions) for length in args.lengths]
    names = [*columns[-1]]
    rows = [[name, *(f"{column.get(name, 0.0):,.0f}" for column in columns)] for name in names]
    print_table(["CPU ms of a step", *(f"{length} tokens" for length in args.lengths)], rows)


if __name__ == "__main__":
    main()
