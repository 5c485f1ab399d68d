"""Tokenizers that cut texts differently."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.post_training.xtoken.tokenizers_of import sentence_piece, train


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "packs": train(folder / "packs", 380, digits=3, special=("<|end|>", "<|mask|>")),
        "splits": train(folder / "splits", 340, digits=1, special=("<eos>", "<pad>"), eos="<eos>"),
        "sentence": sentence_piece(folder / "sentence"),
    }
