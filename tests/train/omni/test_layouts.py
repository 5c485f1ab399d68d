"""A training step of the tiny Omni model in any layout of its modules equals that of one process.

Compared are losses, the final gradients of every parameter, and expert biases after the step. Several layouts
run one after the other in one world.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Tensors, gather
from tests.support.omni_layouts import LANGUAGE, Case, step, steps

#: Relative to the norm of each gradient. Seen are 1e-5, and 5e-5 for the positions of the first sound layer,
#: whose gradients are small by cancellation; a gradient that is summed twice differs by 1.
GRADIENT_RTOL = 2e-4
LOSS_RTOL = 1e-6

QUICK = [
    # On the same ranks, and encoders apart from the language model.
    Case("tp=2", "dp=2", "tp=2", ep=2),
    Case("tp=1,offset=1", "tp=1", "tp=1"),
]
#: Layouts of Super VL, whose only encoder ends with a norm, on four ranks.
SUPER_VL = [
    Case("tp=2,dp=2", "dp=4", "", ep=4),
    Case("tp=2,cp=2", "tp=2,dp=2", ""),
    Case("tp=2,offset=2", "dp=2", "", ep=2),
    Case("cp=2,offset=2", "dp=2", "", feed=True, frozen=("vision",)),
]
WORLDS: dict[str, tuple[int, list[Case]]] = {
    "shared-2": (
        2,
        [
            Case("cp=2", "tp=2", "dp=2"),
            Case("pp=2", "dp=2", "tp=2"),
            Case("dp=2", "tp=2", "dp=2", ep=2, feed=False),
        ],
    ),
    "four": (
        4,
        [
            Case("tp=2,dp=2", "dp=4", "tp=2,dp=2", ep=2),
            Case("tp=2,cp=2", "tp=2,dp=2", "dp=4"),
            Case("cp=2,dp=2", "dp=4", "tp=4", ep=2),
            Case("tp=2,pp=2", "tp=2,dp=2", "dp=4"),
            Case("pp=2,dp=2,order=tp-cp-dp-pp", "dp=4", "tp=2,dp=2", ep=2, feed=False),
            Case("tp=2,dp=2", "dp=4", "dp=4", frozen=("vision", "sound", "sound-projector")),
            # Each module on its own ranks.
            Case("cp=2,offset=2", "tp=1", "tp=1,offset=1"),
        ],
    ),
    "apart-6": (
        6,
        [
            # Three lanes into two.
            Case("dp=2,offset=4", "dp=3", "tp=1,offset=3", feed=False),
            Case("tp=2,offset=4", "dp=3", "tp=1,offset=3"),
            # Both encoders on the same ranks; experts over data lanes.
            Case("tp=2,dp=2,offset=2", "dp=2", "tp=2", ep=2),
            Case("cp=2,dp=2,offset=2", "tp=2", "dp=2", ep=4),
            Case("dp=2,offset=4", "dp=3", "tp=1,offset=3", frozen=("vision", "vision-projector")),
        ],
    ),
    "apart-8": (
        8,
        [
            Case("tp=2,pp=2,offset=4", "tp=2", "dp=2,offset=2"),
            Case("cp=2,pp=2,offset=4", "dp=3", "tp=1,offset=3"),
            Case("tp=2,cp=2,offset=4", "tp=2", "tp=2,offset=2"),
            Case("pp=2,dp=2,order=tp-cp-dp-pp,offset=4", "dp=3", "tp=1,offset=3", ep=2, feed=False),
            # Two lanes of the encoder into three.
            Case("tp=1,dp=3,offset=5", "dp=2", "tp=3,offset=2", feed=False),
        ],
    ),
}


@functools.cache
def reference(sound: bool) -> dict[str, Any]:
    """One process; `weights` are those that all layouts start from."""
    (one,) = run_distributed(step, 1, Case("tp=1", "tp=1", "tp=1" if sound else "", feed=False))
    return one | {what: gather([one[what]]) for what in ("gradients", "biases")}


def check(world: int, cases: list[Case]) -> None:
    one = reference(bool(cases[0].sound))
    ranks = run_distributed(steps, world, cases, one["weights"], timeout=500)
    for number, case in enumerate(cases):
        results = [rank[number] for rank in ranks]
        found = {what: gather([result[what] for result in results]) for what in ("gradients", "biases")}
        compare(case, found["gradients"], one["gradients"])
        assert found["biases"].keys() == one["biases"].keys()
        for name, bias in one["biases"].items():
            assert bias.equal(found["biases"][name]), f"{case}: {name}"
        # Ranks of the last stage have the loss of their positions, tensor ranks the same one.
        loss = sum(result["loss"] for result in results) / case.layouts[LANGUAGE].tp
        assert loss == pytest.approx(one["loss"], rel=LOSS_RTOL), case


def compare(case: Case, found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys(), case
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, wanted in expected.items():
        if case.freezes(name):
            assert not found[name].any(), f"{case}: {name}"
            continue
        if "radio" in name and name.endswith("k_proj.bias"):  # 0 but for rounding, see test_parity.py
            assert max(float(g.abs().max()) for g in (found[name], wanted)) < 1e-7 * largest, (
                f"{case}: {name}"
            )
            continue
        assert wanted.any(), name
        difference = float((found[name] - wanted).norm() / wanted.norm())
        assert difference < GRADIENT_RTOL, f"{case}: {name} differs by {difference:.2g}"


def test_a_step_equals_that_of_one_process() -> None:
    check(2, QUICK)


@pytest.mark.full
def test_super_vl() -> None:
    check(4, SUPER_VL)


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS)
def test_more_layouts(world: str) -> None:
    check(*WORLDS[world])
