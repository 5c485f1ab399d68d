"""A refit's stream through the weight-sync code of verl and NeMo-RL: `VERL_DIR`, `NEMO_RL_DIR`, opt-in."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.refit_packed import Packing

pytestmark = pytest.mark.rl
#: The last has scalars between tensors of other types.
CASES: list[Packing] = [
    ("super-tiny", "tp=2,ep=2", "super-fp8-blockwise", False, {}),
    ("super-tiny", "tp=2,ep=2", "nvfp4", True, {}),
]


def needs(variable: str, *modules: str) -> pytest.MarkDecorator:
    missing = not os.environ.get(variable) or any(importlib.util.find_spec(m) is None for m in modules)
    return pytest.mark.skipif(missing, reason=f"{variable} does not name a checkout, or no {modules}")


@needs("NEMO_RL_DIR")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nemo_rls_consumer_unpacks_the_stream(case: Packing) -> None:
    from tests.rl.refit_ranks import nemo_rl

    assert min(run_distributed(nemo_rl, 2, case, timeout=300)) > 800


@needs("VERL_DIR", "zmq")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_verls_receiver_has_the_stream(case: Packing, tmp_path: Path) -> None:
    from tests.rl.refit_ranks import verl

    assert min(run_distributed(verl, 2, case, tmp_path, timeout=300)) > 800
