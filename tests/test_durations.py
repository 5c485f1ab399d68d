"""tests/durations.txt names the files of tests/, the longest first."""

from __future__ import annotations

from tests.support import durations


def test_most_listed_files_exist() -> None:
    """A file that was renamed counts as light until the suite is measured again."""
    listed = durations.read()
    gone = [name for name in listed if not (durations.TESTS / name).is_file()]
    assert listed and len(gone) < len(listed) / 10, gone
    assert list(listed.values()) == sorted(listed.values(), reverse=True)
