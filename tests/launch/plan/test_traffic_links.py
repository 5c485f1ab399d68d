"""Which links a group's bytes take."""

from __future__ import annotations

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.plan.hardware import GPUS, gpu_named
from megatron_nemotron3.launch.plan.traffic import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    SEND,
    Collective,
    Split,
    deduplicated,
    neighbors,
    split,
    strides,
    usable_domain,
)

H100 = GPUS["h100"]
LAYOUT = ParallelLayout(tp=2, pp=2, ep=16, dp=16)


def transfer(link: str, collective: str, ranks: int) -> Collective:
    return Collective(link, "", collective, ranks, 1, 1600.0)


def test_strides_are_megatrons_rank_order() -> None:
    found = strides(ParallelLayout(tp=2, cp=4, dp=8, pp=3, ep=16, etp=2))
    assert found == {
        "tp": 1, "cp": 2, "dp": 2, "pp": 64, "embedding": 128, "etp": 1, "ep": 2, "edp": 32,
    }  # fmt: skip


def test_64_of_72_are_used() -> None:
    assert usable_domain(GPUS["gb200"]) == 64
    assert usable_domain(gpu_named("gb200", 36)) == 32


@pytest.mark.parametrize(("ranks", "stride", "found"), [(8, 1, 8), (16, 1, 8), (16, 2, 4), (4, 8, 1)])
def test_neighbors(ranks: int, stride: int, found: int) -> None:
    assert neighbors(ranks, stride, 8) == found


def test_an_exchange_of_16_ranks_over_two_nodes() -> None:
    # 100 bytes to each rank: 7 in the node, 8 in the other.
    assert split(transfer("ep", ALL_TO_ALL, 16), LAYOUT, H100) == Split(700, 800)


def test_a_gather_crosses_once_for_each_node() -> None:
    # 16 ranks with stride 2: 4 in each of 4 nodes.
    found = split(transfer("dp", ALL_GATHER, 16), LAYOUT, H100)
    assert found == Split(1600 * 3 / 4, 1600 / 4 * 3 / 4)
    assert split(transfer("dp", ALL_REDUCE, 16), LAYOUT, H100) == Split(2 * found.nvlink, 2 * found.network)
    assert split(transfer("tp", ALL_GATHER, 2), LAYOUT, H100) == Split(800, 0)


def test_stages_of_other_nodes() -> None:
    assert split(transfer("pp", SEND, 2), LAYOUT, H100) == Split(0, 1600)
    assert split(transfer("pp", SEND, 2), ParallelLayout(pp=2, dp=4), H100) == Split(1600, 0)


def test_a_token_goes_to_a_node_once() -> None:
    whole = Split(22 * 7 / 16, 22 * 8 / 16)  # copies of one token
    found = deduplicated(whole, 22, 16, 8)
    assert found.network == pytest.approx(1, rel=1e-4)  # nearly certain that one of 22 is in the other node
    assert found.nvlink == pytest.approx(7 * (1 - (15 / 16) ** 22), rel=1e-12)
    assert deduplicated(whole, 1, 16, 8) == whole
