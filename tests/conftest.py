"""What every test may rely on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

# No test may depend on how busy the machine is.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

_NVTE = {name for name in os.environ if name.startswith("NVTE_")}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What Megatron leaves in the process must not reach the next model.

    It writes its attention backend to NVTE_* variables, sizes its MoE metrics for the first model, and keeps
    the scale of its auxiliary loss in the shape of the first loss.
    """
    if (moe_logging := sys.modules.get("megatron.core.transformer.moe.moe_logging")) is not None:
        moe_logging.destroy_moe_metrics_tracker()
    if (moe_utils := sys.modules.get("megatron.core.transformer.moe.moe_utils")) is not None:
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    for name in [name for name in os.environ if name.startswith("NVTE_") and name not in _NVTE]:
        del os.environ[name]


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """`tests.support.world.world_of_one` for a test module."""
    from tests.support.world import world_of_one

    with world_of_one():
        yield
