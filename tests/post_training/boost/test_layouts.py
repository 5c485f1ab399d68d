"""Heads trained in any layout against one process, and what must not move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.boosting import Boost
from megatron_nemotron3.proof.certify.compare import reference, weights
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.proof.certify.world import Result, train
from tests.parallel.case import Case
from tests.parallel.compare import check
from tests.parallel.layouts import small

CONFIG = small("super", "MEM*EME*").but(mtp_num_layers=3)
DETACHED = ("--mtp-detach-heads",)
OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")


#: Every loss with what only some of them have.
MIXED, VARIATION, PLAIN = (
    Case(config=CONFIG, steps=2, boost=boost.text())
    for boost in (
        Boost(temperature=2.0, mix=0.8, decay=0.7),
        Boost("tv"),
        Boost("ce", mix=1.0),
    )
)
ONE = ParallelLayout()
ROWS = [
    pytest.param(case, layout, extra, marks=() if quick else pytest.mark.full, id=f"{name}-{layout}")
    for name, case, layout, extra, quick in (
        ("mixed", MIXED, ParallelLayout(tp=2, pp=2), (), True),
        ("overlapped", MIXED, ParallelLayout(dp=2), OVERLAPPED, False),
        ("mixed", MIXED, ParallelLayout(pp=2, vpp=2), (), False),
        ("mixed", MIXED, ParallelLayout(tp=2, pp=2, dp=2, ep=2), (), False),
        ("variation", VARIATION, ParallelLayout(tp=2), (), False),
        ("text", PLAIN, ParallelLayout(tp=2, dp=2, ep=2), (), False),
    )
]


@pytest.mark.parametrize(("case", "layout", "extra"), ROWS)
def test_layout_equals_one_process(case: Case, layout: ParallelLayout, extra: tuple[str, ...]) -> None:
    check(case, case.at(layout, *extra))


def require_frozen(before: Tensors, after: Result) -> None:
    """The heads moved and had a gradient; of everything else nothing did, to the bit."""
    for key, value in after.weights.items():
        heads = key.startswith("mtp.")
        assert heads != value.equal(before[key]), key
        if not key.endswith("expert_bias"):
            assert heads == bool(after.gradients[key].any()), key


def test_the_model_stays_as_it_is() -> None:
    require_frozen(weights(MIXED), reference(MIXED))


@pytest.mark.full
@pytest.mark.parametrize("layout", [ONE, ParallelLayout(tp=2, pp=2, dp=2, ep=2)], ids=str)
def test_the_model_stays_as_it_is_with_detached_heads(layout: ParallelLayout) -> None:
    """`--mtp-detach-heads` changes nothing: all that it detaches is frozen."""
    detached = MIXED.at(layout, *DETACHED)
    found = train(detached, weights(MIXED))
    require_frozen(weights(MIXED), found)
    assert found.losses == pytest.approx(reference(MIXED).losses, rel=1e-5)


@pytest.mark.full
def test_one_block_for_each_depth() -> None:
    case = replace(MIXED, config=CONFIG.but(mtp_use_repeated_layer=False, mtp_num_layers=2))
    require_frozen(weights(case), reference(case))
    check(case, case.at(ParallelLayout(tp=2, pp=2)))
