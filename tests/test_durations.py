"""tests/durations.txt names files that exist, the longest first."""

from __future__ import annotations

from tests.support import durations


def test_every_listed_file_exists() -> None:
    listed = durations.read()
    assert listed and [name for name in listed if not (durations.TESTS / name).is_file()] == []
    assert list(listed.values()) == sorted(listed.values(), reverse=True)
