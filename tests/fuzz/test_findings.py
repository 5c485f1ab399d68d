"""Former findings stay fixed, and the fuzzer finds planted errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import guard
from tests.fuzz.fuzz import FINDINGS, fuzz, load, run_cases, workplace
from tests.fuzz.targets import TARGETS

FOUND = [load(path) for path in sorted(FINDINGS.glob("*.json"))]


@pytest.mark.parametrize("name", sorted({finding.target for finding in FOUND}))
def test_fixed(name: str) -> None:
    """They once ended in something else than a ValueError, or not in time."""
    target, cases = TARGETS[name], [finding.case for finding in FOUND if finding.target == name]
    with workplace() as place:
        left = run_cases(target, target.samples(), cases, place)
    assert not left, left[0][1]


@pytest.mark.full
def test_some_hundred_cases(tmp_path: Path) -> None:
    """The same ones each time, of every target that is quick."""
    assert fuzz(["header", "index", "journal", "manifest"], 2.0, seed=5, keep=tmp_path, batch=25) == []


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "wrong exception": (lambda folder: {}["x"], "KeyError: 'x'"),
    "recursion": (lambda folder: BAD["recursion"][0](folder), "RecursionError"),
    "in C": (lambda folder: 10 ** (10**9) and None, "more than 0.2 s"),
    "memory": (lambda folder: bytearray(1 << 30), "MemoryError"),
    "dies": (lambda folder: os._exit(7), "the process died, status 1792"),
    "reads outside": (lambda folder: open("/etc/passwd").close(), "read '/etc/passwd'"),
    "writes outside": (
        lambda folder: open("/tmp/nemotron3-fuzz-x", "w").close(),
        "wrote '/tmp/nemotron3-fuzz-x'",
    ),
    "removes": (lambda folder: os.remove("/tmp/nemotron3-fuzz-x"), "os.remove ('/tmp/nemotron3-fuzz-x'"),
    "hidden": (lambda folder: _hide(lambda: os.system("true")), "os.system (b'true',)"),
}


def _hide(call: Callable[[], object]) -> None:
    with contextlib.suppress(BaseException):
        call()


@pytest.mark.parametrize("name", BAD)
def test_the_guard_sees(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on with the case behind."""
    monkeypatch.setattr(guard, "SECONDS", 0.2)
    bad, what = BAD[name]

    def do(case: int) -> None:
        if case == 1:
            bad(tmp_path)
        if case == 2:
            raise ValueError("as it should be")

    found = guard.run(range(4), lambda case: None, do, tmp_path)
    assert [v.case for v in found] == [1] and what in found[0].what
    assert not os.path.exists("/tmp/nemotron3-fuzz-x")
