"""Functions in a process that has imported Megatron, and our launcher on ranks, as torchrun starts it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from typing import Any
from unittest import mock

from megatron_nemotron3.common.ranks import Call, free_port, run_ranks
from megatron_nemotron3.cpu.async_save import forked_results
from megatron_nemotron3.proof.certify.ranks import PRELOAD
from megatron_nemotron3.train.log import Curve
from megatron_nemotron3.train.processes import ENTRY


def run_fresh(function: Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
    """Call `function(*args)` in a process of its own that has imported Megatron and nothing else.

    As `run_distributed`, without CPU mode and without a world.
    """
    return run_ranks(Call(function, args), 1, timeout=timeout, preload=PRELOAD)[0]


def run_launcher(argv: list[str], world_size: int, timeout: float = 120, *, inside: Any = nullcontext) -> str:
    """What `torchrun --nproc-per-node WORLD_SIZE -m megatron_nemotron3.run ARGV…` prints, ranks in order.

    The processes are forked with Megatron imported, which saves the ten seconds a start costs. `inside` is an
    importable function whose block they run in.
    """
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}):
        call = Call(_launch_and_save_quickly, (argv, inside))
    return "".join(run_ranks(call, world_size, timeout=timeout, preload=PRELOAD))


def trained(argv: list[str], world_size: int, *, inside: Any = nullcontext) -> Curve:
    """The losses that `run_launcher` prints for a training on the CPU with our script."""
    return curve_of(
        run_launcher(["--device", "cpu", str(ENTRY), *argv], world_size, timeout=240, inside=inside)
    )


def curve_of(output: str) -> Curve:
    """The losses in what a training printed."""
    curve = Curve()
    for line in output.splitlines():
        curve.add(line)
    return curve


def launch(argv: list[str]) -> str:
    from megatron_nemotron3.run import main

    output = io.StringIO()
    with redirect_stdout(output):
        try:
            main(argv)
        except SystemExit as end:  # --exit-interval leaves this way
            if end.code:
                raise
    return output.getvalue()


def _launch_and_save_quickly(argv: list[str], inside: Any) -> str:
    with forked_results(), inside():
        return launch(argv)
