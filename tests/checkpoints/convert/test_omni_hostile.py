"""Omni checkpoints that cannot be converted: exit 2, one line, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_nemotron3.checkpoints.convert import omni_inventory
from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.omni_config import omni_json
from megatron_nemotron3.models.omni import NANO_OMNI, tiny
from tests.support import omni_checkpoints as folders
from tests.support.hf_folders import omni_tensors, write_hf
from tests.support.omni_checkpoints import nemotron3

MODEL = tiny(NANO_OMNI)
Values = dict[str, torch.Tensor]
BLOCK = "vision_model.radio_model.model.blocks.0."


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf and megatron: a model with encoders; text and text_megatron: its language model."""
    folder = tmp_path_factory.mktemp("omni")
    (folder / "hf").mkdir()
    made = torch.Generator().manual_seed(3)
    values = {
        t.name: torch.randn(t.shape, generator=made).to(getattr(torch, t.dtype))
        for t in omni_tensors(MODEL, "float32")
    }
    values |= {name: value.clone() for name, value in omni_inventory.made(MODEL, "float32").items()}
    save_file(values, folder / "hf/model.safetensors", {"format": "pt"})
    (folder / "hf/config.json").write_text(json.dumps(omni_json(MODEL, dtype="float32")))
    write_hf(folder / "text", MODEL.language, dtype="float32")
    for name in ("hf", "text"):
        target = folder / {"hf": "megatron", "text": "text_megatron"}[name]
        assert nemotron3("convert", "from-hf", folder / name, target, "--workers", 1) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], target: Path, *words: object) -> str:
    """Run a command that must end with exit status 2 and one line, and write nothing."""
    capsys.readouterr()
    assert nemotron3(*words) == 2
    err = capsys.readouterr().err.strip()
    assert err and "\n" not in err and "Traceback" not in err
    assert not target.exists() and not target.with_name(target.name + ".partial").exists()
    return err


def _drop(*starts: str) -> Callable[[Values], None]:
    def change(values: Values) -> None:
        for name in [name for name in values if name.startswith(starts)]:
            del values[name]

    return change


def _set(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Values], None]:
    def change(values: Values) -> None:
        values[name] = value(values[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (_drop("mlp1.1."), {}, "1 of 347 tensors are missing, first 'mlp1.1.weight'"),
        (_drop("vision", "sound", "mlp1"), {}, "it has no encoder at all"),
        (
            _drop("sound"),
            {},
            "tensors are missing, first 'sound_encoder.encoder.subsampling.layers.0.weight'",
        ),
        (_drop(), {"audio_config": None}, "do not belong to the model, first 'sound_"),
        (_drop("language_model.lm_head"), {}, "first 'language_model.lm_head.weight'"),
        (_set("mlp1.1.weight", lambda t: t[:5]), {}, "[5, 256] instead of [512, 256]"),
        (_set(f"{BLOCK}attn.qkv.bias", lambda t: t.int()), {}, "is int32"),
        (
            _set(f"{BLOCK}layer_scale1.lambda1", lambda t: t * 2),
            {},
            "layer_scale1.lambda1 is not 1 everywhere",
        ),
        (_set("vision_model.radio_model.summary_idxs", lambda t: t + 1), {}, "summary_idxs is not [0, 1]"),
        (
            _set("sound_encoder.encoder.layers.0.conv.norm.num_batches_tracked", lambda t: t.float()),
            {},
            "num_batches_tracked is float32, expected int64",
        ),
        (_drop(), {"projector_hidden_size": 256}, "2 tensors have another shape"),
        (_drop(), {"quantization_config": {}}, "quantized weights of a model with encoders are not read"),
        (_drop(), {"model_type": "nemotron_h_omni_two"}, "Nemotron Omni model"),
    ],
)
def test_hugging_face_folders(
    change: Callable[[Values], None],
    config: dict[str, Any],
    message: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hf = folders.rewritten(place / "hf", tmp_path / "hf", change, **config)
    assert message in refused(capsys, tmp_path / "out", "convert", "from-hf", hf, tmp_path / "out")


def test_a_language_model_given_as_omni_and_the_reverse(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    text = json.loads((place / "text/config.json").read_text())
    omni = json.loads((place / "hf/config.json").read_text())
    hf = folders.rewritten(place / "text", tmp_path / "text", lambda values: None)
    (hf / "config.json").write_text(json.dumps(omni))
    assert "347 of 347 tensors are missing" in refused(capsys, out, "convert", "from-hf", hf, out)
    hf = folders.rewritten(place / "hf", tmp_path / "omni", lambda values: None)
    (hf / "config.json").write_text(json.dumps(text))
    assert "do not belong to the model" in refused(capsys, out, "convert", "from-hf", hf, out)
    # What is for language models names the way out.
    for name in ("hf", "megatron"):
        with pytest.raises(ValueError, match="--only language"):
            open_checkpoint(place / name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("to-hf", "text_megatron", "--only", "language"), "it has no encoders"),
        (("to-hf", "megatron", "--into", "hf"), "--into: it says what a part is put into"),
        (("to-hf", "text_megatron", "--only", "language", "--into", "text"), "it is a language model"),
        (
            ("to-hf", "text_megatron", "--only", "language", "--into", "megatron"),
            "it is a Megatron checkpoint",
        ),
        (("from-hf", "text", "--only", "language", "--into", "hf"), "it is a Hugging Face folder"),
        (("to-hf", "megatron", "--quantize", "nvfp4"), "--quantize: it is for language models"),
        (("to-hf", "megatron", "--reference", "text"), "model_type='nemotron_h': not a Nemotron Omni model"),
        (
            ("from-hf", "text", "--only", "language", "--into", "megatron", "--dtype", "bfloat16"),
            "give --dtype",
        ),
    ],
)
def test_options(
    words: tuple[str, ...], message: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way, source, *rest = words
    given = [place / word if (place / word).exists() else word for word in rest]
    out = tmp_path / "out"
    assert message in refused(capsys, out, "convert", way, place / source, out, *given, "--workers", 1)
