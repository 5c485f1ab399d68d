"""Checkpoint folders that several test modules read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.generation_folders import Folders, make


@pytest.fixture(scope="session")
def folders_with_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    """Folders of a small model with its tokenizer; tests must not change them."""
    monkeypatch = pytest.MonkeyPatch()
    yield make(tmp_path_factory.mktemp("text"), monkeypatch)
    monkeypatch.undo()
