"""Experts drawn on CPUs: each rank has its own, and all together those of one process."""

from __future__ import annotations

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Pieces, Tensors, gather
from megatron_nemotron3.proof.certify.world import build, pieces
from tests.parallel.case import Case


def _drawn(case: Case) -> Pieces:
    return pieces(build(case)[0])


def _experts(**sizes: int) -> Tensors:
    case = Case(config=tiny(get("super")).but(pattern="E"), layout=ParallelLayout(**sizes))
    whole = gather(run_distributed(_drawn, case.layout.world_size, case, apart=True))
    return {key: tensor for key, tensor in whole.items() if ".experts.experts." in key}


@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"tp": 2, "etp": 1, "ep": 2}])
def test_the_layout_does_not_change_what_is_drawn(sizes: dict[str, int]) -> None:
    whole, found = _experts(), _experts(**sizes)
    assert len(whole) == 4, whole.keys()
    for key, tensor in whole.items():
        assert tensor.equal(found[key]), key
        assert len(tensor.flatten(1).unique(dim=0)) == len(tensor), key
