"""What every test may rely on."""

from __future__ import annotations

import os

import pytest

_NVTE = {name for name in os.environ if name.startswith("NVTE_")}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Megatron writes its attention backend to NVTE_* variables, which the next model must not inherit."""
    for name in [name for name in os.environ if name.startswith("NVTE_") and name not in _NVTE]:
        del os.environ[name]
