"""Nothing fails for launches that are right: random ones here, those of the recipes in tests/recipes."""

from __future__ import annotations

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify import proof
from megatron_nemotron3.proof.certify.bench import PropertyState
from megatron_nemotron3.proof.certify.layouts import Sizes, cover
from tests.proof.certify.random_launches import RandomLaunch, findings, launches, proxy_of
from tests.properties.strategies import draw_many

#: The stages that a launch of few ranks passes in seconds.
QUICK = [stage for stage in proof.STAGES if stage.findings in (proof.layouts, proof.rules)]


def ranks(launch: RandomLaunch) -> int:
    """Ranks of the largest layout of the proxy."""
    return max(sizes.layout.world_size for sizes in proxy_of(launch).sizes)


def failures(launch: RandomLaunch, stages: list[proof.Stage] | None = None) -> list[str]:
    found = findings(launch, stages=stages)
    assert any(one.state is PropertyState.PASS for one in found)
    return [
        f"{one.name}, {one.where}: {one.difference} {one.detail}"
        for one in found
        if one.state is PropertyState.FAIL
    ]


def test_a_random_launch_raises_no_alarm() -> None:
    (launch,) = draw_many(launches().filter(lambda launch: ranks(launch) == 2), 1, draw=1)
    assert not failures(launch, QUICK), launch


@pytest.mark.full
def test_random_launches_raise_no_alarm() -> None:
    """The first of those of docs/measurements.md, with every stage."""
    wrong = {number: failures(launch) for number, launch in enumerate(draw_many(launches(), 20, draw=0))}
    assert not any(wrong.values()), wrong


@pytest.mark.full
def test_a_draw_has_every_kind_of_launch() -> None:
    """No alarm means something only where there is something to be wrong."""
    drawn = draw_many(launches(), 100, draw=0)
    options = {word for launch in drawn for word in launch.words}
    wanted = (
        *("--sft", "--dataloader-inter-document-masking", "--eod-mask-loss", "--calculate-per-token-loss"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--num-distributed-optimizer-instances"),
        *("--use-distributed-optimizer", "--recompute-granularity", "--moe-z-loss-coeff", "--mtp-num-layers"),
        *("--num-experts", "--moe-latent-size", "--bf16", "--fp4-format", "--moe-token-dispatcher-type"),
    )
    assert not set(wanted) - options
    layouts = [proxy_of(launch).large.layout for launch in drawn]
    for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp"):
        assert sum(getattr(layout, name) > 1 for layout in layouts) >= 5, name


def test_optimizer_instances_divide_the_copies_of_experts() -> None:
    """Also where the launch does not say how many ranks it has, and the number assumed is too small."""
    chosen, missing = cover(Sizes(layout=ParallelLayout(dp=4, ep=4), instances=2), 8)
    assert all(sizes.layout.edp % sizes.instances == 0 for sizes in chosen), chosen
    assert ("optimizer instances", "optimizer instances") in missing
