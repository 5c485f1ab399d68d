"""Quantization-aware distillation by the commands of a user: from a model to its packed checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_nemotron3.common.switches import EMULATE

from .test_commands import nemotron3, train
from .test_commands import text as text


@pytest.mark.full
def test_a_model_learns_from_itself(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher has the weights before packing: without packing there is nothing to learn, with it there
    is. What was trained is packed with the same recipe, and comes back."""
    base, plain, packed = (tmp_path / name for name in ("base", "plain", "packed"))
    train("super", text, base, "--precision", "bf16")
    itself = ("--pretrained", str(base), "--teacher", str(base))
    assert train("super", text, plain, *itself, "--precision", "bf16").values["divergence"] == 0
    monkeypatch.setenv(EMULATE, "super-nvfp4")
    first = train("super", text, packed, *itself, "--emulate")
    assert 0 < first.values["divergence"] < 0.1
    assert "have the weights of super-nvfp4" in (packed / "train.log").read_text()
    assert not (packed / "precision.yaml").exists()
    monkeypatch.delenv(EMULATE)
    hf, back = str(tmp_path / "hf"), str(tmp_path / "back")
    nemotron3("convert", "to-hf", str(packed / "checkpoints"), hf, "--quantize", "super-nvfp4")
    stated = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == "modelopt"
    nemotron3("convert", "from-hf", hf, back, "--dequantize")
