"""Folders that several modules read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .folders import Folders, make


@pytest.fixture(scope="session")
def folders_with_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    """`folders.Folders`, not to be changed."""
    monkeypatch = pytest.MonkeyPatch()
    yield make(tmp_path_factory.mktemp("text"), monkeypatch)
    monkeypatch.undo()
