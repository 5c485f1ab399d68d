"""Checkpoint folders that several test modules read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_nemotron3.generate import graphed_drafts, graphs
from tests.support.generation_folders import Folders, make
from tests.support.replayed import record


@pytest.fixture(scope="session")
def folders_with_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    """Folders of a small model with its tokenizer; tests must not change them."""
    monkeypatch = pytest.MonkeyPatch()
    yield make(tmp_path_factory.mktemp("text"), monkeypatch)
    monkeypatch.undo()


@pytest.fixture
def replayed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs of the engine are recordings, which are repeated."""
    for module in (graphs, graphed_drafts):
        monkeypatch.setattr(module, "replayed", record)
