"""What `add_arguments` refuses; `tests/bridge/test_training.py` resumes what it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3.checkpoints.convert.bridge_checkpoint import add_arguments


@pytest.mark.parametrize("text", [None, "[1, 2]", "a: [", "train: {}"])
def test_other_folders_are_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run_config.yaml").write_text(text)
    with pytest.raises(ValueError, match="is not a checkpoint of Megatron-Bridge"):
        add_arguments(tmp_path)
    assert not (tmp_path / "common.pt").exists()
