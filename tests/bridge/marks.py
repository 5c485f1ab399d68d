"""Marks of a test module that needs Megatron-Bridge."""

from __future__ import annotations

import importlib.util

import pytest

MARKS = [
    pytest.mark.bridge,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.bridge") is None,
        reason="Megatron-Bridge is not installed: make test-bridge",
    ),
]
