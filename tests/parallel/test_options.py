"""Options that save memory or divide the optimizer otherwise: the numbers of a plain run on one rank.

What Megatron refuses on a CPU is tested to be refused still: docs/parity.md lists it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_nemotron3.args import ParallelLayout
from tests.parallel.compare import check
from tests.parallel.layouts import CASES

_L = ParallelLayout
_FULL = ("--recompute-granularity", "full", "--recompute-method")
_SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
_INSTANCES = ("--num-distributed-optimizer-instances", "2")


@dataclass(frozen=True)
class Option:
    """Megatron's words in a layout, for a model of `CASES`."""

    model: str
    layout: ParallelLayout
    words: tuple[str, ...]
    quick: bool = False


OPTIONS: dict[str, Option] = {
    "full, uniform": Option("super", _L(tp=2, pp=2), (*_FULL, "uniform", "--recompute-num-layers", "1")),
    "full, block": Option("super", _L(pp=2, vpp=2), (*_FULL, "block", "--recompute-num-layers", "1")),
    "full, CP": Option("super", _L(cp=2), (*_FULL, "uniform", "--recompute-num-layers", "1")),
    "core_attn": Option("super", _L(cp=2), (*_SELECTIVE, "core_attn")),
    "mlp": Option("dense", _L(tp=2), (*_SELECTIVE, "mlp")),
    "moe": Option("nano", _L(dp=2, ep=2), (*_SELECTIVE, "moe")),
    "shared_experts": Option("super", _L(tp=2, ep=2), (*_SELECTIVE, "shared_experts")),
    # The dispatcher's exchanges are repeated on every rank, in the order of the others.
    "all modules": Option("super", _L(tp=2, ep=2), (*_SELECTIVE, "core_attn", "moe"), quick=True),
    "all modules, PP": Option(
        "super", _L(tp=2, pp=2, ep=2), (*_SELECTIVE, "core_attn", "moe", "shared_experts")
    ),
    "optimizer instances": Option("super", _L(dp=4), _INSTANCES),
    "optimizer instances, EP": Option("super", _L(dp=4, ep=2), _INSTANCES, quick=True),
    "optimizer instances, overlap": Option(
        "nano", _L(dp=4, ep=2), (*_INSTANCES, "--overlap-grad-reduce", "--overlap-param-gather")
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if option.quick else pytest.mark.full, id=n) for n, option in OPTIONS.items()],
)
def test_option_equals_the_plain_run(name: str) -> None:
    """Losses, gradients, weights after three steps, expert biases."""
    option = OPTIONS[name]
    one = CASES[option.model]
    check(one, one.at(option.layout, *option.words))
