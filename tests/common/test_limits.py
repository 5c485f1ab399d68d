"""A child that answers requests within limits."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from megatron_nemotron3.common import limits
from megatron_nemotron3.common.limits import LimitedChild, LimitError, limited


def test_a_child_after_a_moment_of_little_memory_has_its_whole_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 120 MiB: 64 are what a child may always take, 256 what this one may."""
    child = LimitedChild(lambda request: bytes(120 << 20)[:1] + request, memory=256 << 20, seconds=5)
    with monkeypatch.context() as little:
        little.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
        with pytest.raises(LimitError, match="needs more than 64 MiB of memory"):
            child.ask(b"a")
    assert child.ask(b"b") == b"\0b"
    child.close()


def test_how_a_child_ended_is_said() -> None:
    """Libraries of C++ abort without memory; SIGXCPU is the end of its time."""
    child = LimitedChild(lambda request: os.kill(os.getpid(), int(request)), memory=64 << 20, seconds=5)  # type: ignore[arg-type,return-value]
    said = {
        signal.SIGABRT: "needs more than 64 MiB",
        signal.SIGXCPU: "takes more than 5 s",
        signal.SIGSEGV: "signal 11",
    }
    for ended, reason in said.items():
        with pytest.raises(LimitError, match=reason):
            child.ask(b"%d" % ended)


def test_work_that_returns_or_raises_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result and its errors are those of this process; a limit is said with the subject."""
    assert limited(lambda: {"a": (1, None)}, "the text") == {"a": (1, None)}
    with pytest.raises(KeyError, match="x"):
        limited(lambda: {}["x"], "the text")
    with pytest.raises(ValueError, match=r"the text needs more than [0-9,]+ MiB of memory"):
        limited(lambda: bytearray(1 << 40), "the text")
    monkeypatch.setattr(limits, "SECONDS", 1)
    with pytest.raises(ValueError, match="the text takes more than 1 s, the most that its reading may take"):
        limited(lambda: 10 ** (10**9) and None, "the text")
