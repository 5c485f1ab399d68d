"""Upstream's own tests pass with our communicators (docs/measurements.md has the command)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_nemotron3.launch import versions
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.boundary_upstream import run_file

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.checkout,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_DIR names no Megatron-LM checkout"),
]

PIPELINE = "megatron.core.pipeline_parallel"
BRIDGE = {f"{PIPELINE}.bridge_communicator:BridgeCommunicator": "megatron_nemotron3.boundary.bridge:Bridge"}
MULTIMODULE = {
    f"{PIPELINE}.multimodule_communicator:MultiModulePipelineCommunicator": (
        "megatron_nemotron3.boundary.multimodule:BoundaryCommunicator"
    )
}
COLOCATED = {
    "megatron.core.models.mimo.comm.colocated_communicator:ColocatedBridgeCommunicator": (
        "megatron_nemotron3.boundary.colocated:ColocatedBridge"
    )
}
#: Tests with transformer blocks need TransformerEngine.
TE = ("transformer",)
#: Layouts that upstream refuses and ours run: a language model with PP above 1, lanes that do not divide.
LIMITS = ("test_pp_or_cp_gt_one_rejected[dest-pp", "test_dp_not_divisible")


@pytest.mark.parametrize(
    ("file", "classes", "without", "numbers"),
    [
        ("pipeline_parallel/test_bridge_communicator.py", BRIDGE, TE, (25, 29)),
        ("pipeline_parallel/test_multimodule_communicator.py", BRIDGE | MULTIMODULE, TE, (6, 6)),
        ("models/mimo/test_mimo_colocated_communicator.py", COLOCATED, LIMITS, (22, 22)),
    ],
    ids=["bridge", "multimodule", "colocated"],
)
def test_upstream_tests(file, classes, without, numbers):
    """Every test passes on every rank, and as many as there are in 0.19 and on main."""
    from megatron.core import __version__

    number = dict(zip(versions.KNOWN, numbers, strict=True))[versions.minor(__version__)]
    path = Path("tests/unit_tests") / file
    found = run_distributed(run_file, 8, CHECKOUT, str(path), classes, without, timeout=300)
    for rank, (outcomes, left_out) in enumerate(found):
        wrong = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(outcomes) == number, f"left out: {left_out}"
