"""CPU time of a training step of our torch model by part, on one thread, and against its limit.

    OMP_NUM_THREADS=1 python benchmarks/parts.py [--lengths 512 8192]

Model and step are those of train_step.py. Hand-written autograd functions, router and dispatch are timed as a
whole. All other torch operations, and the matrix products inside those functions, are timed one by one in
steps of their own, because that adds overhead. Both kinds of steps take turns, and medians are printed. One
thread and CPU time make the result robust against other load on the machine.

The limit is what the step's own matrix products (dense layers, router, experts) and attention take in the
same run. The products of the scan are a choice of algorithm, so they are listed but not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common import machine, parser, print_table
from train_step import Ours

#: Matrix products of torch.
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "_linear_pointwise"}
#: Other operation of torch -> row of the table.
OPERATIONS = {
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
}
#: Rows about the limit: parts of rows above, sums and ratios.
EXPERTS, SCAN, LIMIT = "products of the experts", "products of the scan", "limit"
RATIO, RATIO_WITH_SCAN = "whole step / limit", "whole step / (limit + products of the scan)"


class Clock:
    """CPU seconds by name; calls inside a timed function count for that function."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        #: Of the matrix products inside each timed function.
        self.products: dict[str, float] = defaultdict(float)
        self.inside: str | None = None

    def clear(self) -> None:
        """Forget all times."""
        self.seconds.clear()
        self.products.clear()

    def wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return `function` with timing."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside, start = name, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - start
                self.inside = None

        return timed

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of torch: time all that are outside of timed functions, and products inside."""
        name = function.__name__.split(".")[0]
        product = name in PRODUCTS
        if self.inside and not product:
            return function(*args, **kwargs)
        start = time.thread_time()
        result = function(*args, **kwargs)
        seconds = time.thread_time() - start
        if self.inside:
            self.products[self.inside] += seconds
        else:
            row = "dense products" if product else OPERATIONS.get(name, "other operations")
            self.seconds[row] += seconds
        return result


def clock_parts(clock: Clock) -> None:
    """Time our autograd functions and Megatron's router and dispatcher, for this process."""
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
            timed = clock.wrap(own, "router and dispatch, forward")
            setattr(MoEAlltoAllTokenDispatcher, method, timed)


def by_part(side: Ours, clock: Clock, length: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of a step by part, and the rows about the limit."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class TimeOperations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return clock.operation(func, args, kwargs or {})

    totals, seconds, products = [], defaultdict(list), defaultdict(list)
    side.step(length)
    for _ in range(repetitions):
        clock.clear()
        start = time.process_time()
        side.step(length)
        totals.append(time.process_time() - start)
        parts = {**clock.seconds}
        clock.clear()
        with TimeOperations():
            side.step(length)
        for name, value in {**clock.seconds, **parts}.items():
            seconds[name].append(value)
        for name, value in clock.products.items():
            products[name].append(value)
    total = statistics.median(totals) * 1e3
    rows = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    own = {name: statistics.median(values) * 1e3 for name, values in products.items()}
    scan = own.pop("scan")
    limit = rows["dense products"] + rows["attention"] + sum(own.values())
    return {
        **dict(sorted(rows.items(), key=lambda row: -row[1])),
        "Python and autograd": total - sum(rows.values()),
        "whole step": total,
        EXPERTS: own["experts"],
        SCAN: scan,
        LIMIT: limit,
        RATIO: total / limit,
        RATIO_WITH_SCAN: total / (limit + scan),
    }


def peak_gflops(product: Callable[[Any, Any], Any]) -> float:
    """GFLOP/s of a product of two 1024 x 1024 matrices."""
    import torch

    a = torch.randn(1024, 1024)
    product(a, a)
    start = time.thread_time()
    for _ in range(5):
        product(a, a)
    return 5 * 2 * 1024**3 / (time.thread_time() - start) / 1e9


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--lengths", type=int, nargs="+", default=[512, 8192])
    arguments.add_argument("--repetitions", type=int, default=5)
    args = arguments.parse_args()
    import torch

    from megatron_nemotron3.cpu.products import linear

    torch.set_num_threads(1)
    side, clock = Ours(), Clock()
    large = f"{peak_gflops(torch.mm):.0f} GFLOP/s by torch, {peak_gflops(linear):.0f} by our layers"
    print(f"{machine()}; one thread used; large product: {large}", flush=True)
    clock_parts(clock)
    columns = [by_part(side, clock, length, args.repetitions) for length in args.lengths]
    names = [*columns[-1]]
    digits = {RATIO: 2, RATIO_WITH_SCAN: 2}
    rows = [
        [name, *(f"{column.get(name, 0.0):,.{digits.get(name, 0)}f}" for column in columns)] for name in names
    ]
    print_table(["CPU ms of a step", *(f"{length} tokens" for length in args.lengths)], rows)


if __name__ == "__main__":
    main()
