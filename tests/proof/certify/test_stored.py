"""What is compared of a checkpoint that went to Hugging Face's form and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.checkpoints.convert.conversion import FromHfOptions, convert_from_hf
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.proof.certify import checkpoints
from megatron_nemotron3.proof.certify.bench import PropertyState
from tests.support.hf_folders import write_hf

_EMBEDDING = "embedding.word_embeddings.weight"


def test_padding_of_the_vocabulary_need_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training moves no padding row, but it is random at the start; an export has none."""
    config = tiny(get("nano")).but(vocab_size=120)
    write_hf(tmp_path / "hf", config)
    convert_from_hf(
        tmp_path / "hf", tmp_path / "run", FromHfOptions(make_vocab_size_divisible_by=128, workers=1)
    )
    read, rows = checkpoints._tensors, slice(120, None)

    def as_trained(source: Any) -> Any:
        """The first that is read is the run's own."""
        found = read(source)
        assert found[_EMBEDDING].shape[0] == 128
        found[_EMBEDDING][rows] = 1
        monkeypatch.setattr(checkpoints, "_tensors", read)
        return found

    for vocabulary, wrong_rows, state in (
        (120, slice(120, None), PropertyState.PASS),
        (None, slice(120, None), PropertyState.FAIL),
        (120, slice(119, None), PropertyState.FAIL),
    ):
        rows = wrong_rows
        monkeypatch.setattr(checkpoints, "_tensors", as_trained)
        (found,) = checkpoints.round_trip(
            tmp_path / "run", 128, tmp_path / f"{vocabulary}-{rows}", vocabulary
        )
        assert found.state is state, found
