"""A model whose E layers differ computes the same in every layout: its table is by layer of the model."""

from __future__ import annotations

import pytest

from megatron_nemotron3.launch import ParallelLayout
from tests.parallel.case import Case
from tests.parallel.compare import check
from tests.parallel.layouts import LAYOUTS
from tests.support.own_stack import WORDS, config

#: A batch without near ties in routing: where one expert is swapped, a gradient norm moves by 1e-5.
CASE = Case(config=config, extra=WORDS, seed=9)
#: PP 2 with VPP 2: "ME", "*E" on one rank, "EM", "ME" on the other.
ROWS = (
    *("PP2 VPP2", "TP2 SP EP2 alltoall"),
    *("TP2 SP", "EP2 alltoall", "EP2 allgather", "PP2", "TP2 SP, expert TP2, alltoall", "CP2"),
    *("DP2 distributed optimizer", "TP2 SP PP2 EP2"),
)
_FULL_RECOMPUTE = ("--recompute-method", "uniform", "--recompute-num-layers", "1")
RECOMPUTE = {
    "full": ("--recompute-granularity", "full", *_FULL_RECOMPUTE),
    "moe": ("--recompute-granularity", "selective", "--recompute-modules", "moe"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_layout_equals_one_process(name: str) -> None:
    row = LAYOUTS[name]
    check(CASE, CASE.at(row.sizes, *row.extra, without=row.without))


@pytest.mark.full
@pytest.mark.parametrize("how", RECOMPUTE)
def test_recomputed_layers_keep_their_experts(how: str) -> None:
    check(CASE, CASE.at(ParallelLayout(tp=2, pp=2), *RECOMPUTE[how]))


@pytest.mark.full
@pytest.mark.parametrize("layout", [ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, pp=2)], ids=str)
def test_adapters(layout: ParallelLayout) -> None:
    case = Case(config=config, extra=WORDS, seed=9, lora="dim=4,alpha=8,targets=linear_fc1+linear_fc2")
    check(case, case.at(layout))
