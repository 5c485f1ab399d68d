"""Layouts, and patterns cut into pipeline stages of about equal work."""

from __future__ import annotations

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import ParallelLayout, cut_pattern, published_layout
from megatron_nemotron3.launch.layout import last_stage_cost
from megatron_nemotron3.models.parameters import layer_flops as layer_cost
from megatron_nemotron3.models.pattern import parse


def test_layout_derives() -> None:
    layout = ParallelLayout(tp=2, pp=4, cp=2, dp=8, ep=16)
    assert (layout.world_size, layout.edp, layout.sequence_parallel) == (128, 2, True)
    assert str(layout) == "TP2 PP4 EP16 CP2 DP8 SP"
    assert str(ParallelLayout()) == "1 rank"
    assert ParallelLayout(tp=2, sp=False).sequence_parallel is False


@pytest.mark.parametrize(
    "sizes", [{"tp": 0}, {"ep": -1}, {"dp": 1.0}, {"cp": True}, {"sp": 1}, {"pp": "2"}, {"etp": None}]
)
def test_layout_refuses(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(("name", "ranks"), [("nano", 3072), ("super", 3072), ("ultra", 6144)])
def test_published_layouts_have_the_published_size(name: str, ranks: int) -> None:
    layout = published_layout(models.get(name))
    assert layout is not None
    assert layout.world_size == ranks
    assert published_layout(models.get(f"{name}-tiny")) is None


@pytest.mark.parametrize("name", [*models.names(), "super-tiny"])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_cut_keeps_the_layers(name: str, pp: int, vpp: int) -> None:
    config = models.get(name)
    parsed = parse(cut_pattern(config, ParallelLayout(pp=pp, vpp=vpp)))
    assert len(parsed.stages) == pp * vpp
    assert parsed.main == config.pattern
    assert "".join(f"/{depth}" for depth in parsed.mtp) == config.full_pattern.removeprefix(config.pattern)


def test_cut_balances_the_work_not_the_layers() -> None:
    """Ultra on 4 stages: the most loaded is within 5 % of the mean; equal layer counts are not."""
    config, seq = models.ULTRA, 8192

    def worst(stages: tuple[str, ...]) -> float:
        costs = [sum(layer_cost(config, kind, seq) for kind in stage) for stage in stages]
        costs[-1] += last_stage_cost(config, seq)
        return max(costs) / (sum(costs) / len(costs))

    ours = parse(cut_pattern(config, ParallelLayout(pp=4))).stages
    equal = tuple(config.pattern[i : i + 27] for i in range(0, 108, 27))
    assert worst(ours) < 1.05 < worst(equal)
    assert len(ours[-1]) < 27  # the output layer and MTP take the place of layers
