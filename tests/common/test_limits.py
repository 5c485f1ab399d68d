"""A child that answers requests within limits."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from megatron_nemotron3.common.limits import LimitedChild, LimitError


def test_a_child_after_a_moment_of_little_memory_has_its_whole_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 120 MiB: 64 are what a child may always take, 256 what this one may."""
    child = LimitedChild(lambda request: bytes(120 << 20)[:1] + request, memory=256 << 20, seconds=5)
    with monkeypatch.context() as little:
        little.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
        with pytest.raises(LimitError, match="needs more than 64 MiB of memory"):
            child.ask(b"a")
    assert child.ask(b"b") == b"\0b"
    child.close()
