"""The catalog's models with encoders: counts against what was published, tensors against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_nemotron3.models.omni import NANO_OMNI, SUPER_VL, OmniConfig, get_omni, with_encoders
from megatron_nemotron3.models.omni_tensors import PARTS, count_parts, encoder_tensors, released_tensors
from megatron_nemotron3.models.parameters import stored_tensors


def test_published_total() -> None:
    """Megatron-Bridge's verification card: elements of its Megatron model, tensors of the released folder."""
    assert sum(count_parts(NANO_OMNI).values()) == 33_015_546_816
    assert released_tensors(NANO_OMNI) == 7_349


def test_names() -> None:
    assert get_omni("Nano-Omni") is NANO_OMNI
    assert get_omni("nano") is None
    small = get_omni("nano-omni-tiny")
    assert small is not None and small.language.name == "nano-tiny"


def test_encoders_as_json() -> None:
    assert "final_layernorm" not in NANO_OMNI.encoders_json()  # as in checkpoints from before Super VL
    for model in (NANO_OMNI, NANO_OMNI.but(sound=None, sound_token_id=None), SUPER_VL):
        again = with_encoders(model.language, model.encoders_json())
        assert again.but(name="x", title="") == model.but(
            name="x", title="", published_total=None, source=None
        )
    for text in ("{", "[]", '{"sound": null}', '{"sound": null, "vision": {"layers": 3}}'):
        with pytest.raises(ValueError, match="not what encoders_json wrote"):
            with_encoders(NANO_OMNI.language, text)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (
            "vision",
            {"num_attention_heads": 7},
            "width 1280 of the vision encoder is no multiple of its 7 heads",
        ),
        ("vision", {"num_layers": 0}, "num_layers=0 of vision: give a number from 1"),
        (
            "vision",
            {"hidden_size": 11, "num_attention_heads": 1, "ffn_hidden_size": 30},
            "=30 of vision is no ratio",
        ),
        ("sound", {"subsampling_factor": 6}, "subsampling_factor=6: give a power of 2"),
        ("sound", {"mel_bins": 100}, "mel_bins=100 is no multiple of subsampling_factor=8"),
        ("", {"sound_token_id": 18}, "image_token_id and sound_token_id are both 18"),
        ("", {"sound_token_id": None}, "sound=a Sound and sound_token_id=None: give both"),
        ("", {"sound": None}, "sound=None and sound_token_id=27: give both, or None twice"),
    ],
)
def test_sizes_that_do_not_fit(part: str, changes: dict[str, Any], message: str) -> None:
    if part:
        changes = {part: replace(getattr(NANO_OMNI, part), **changes)}
    with pytest.raises(ValueError, match=message):
        NANO_OMNI.but(**changes)


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_nemotron3.cli import main

    assert main(["show", "nano-omni", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["total"] == sum(facts["parameters"].values()) == 33_015_546_816
    assert facts["tensors"] == sum(facts["tensors_by_part"].values()) == 7_349
    assert facts["vision"]["projector_size"] == 20480
    assert facts["token_ids"] == {"image": 18, "sound": 27}
    assert main(["show", "nano-omni"]) == 0
    text = capsys.readouterr().out
    for number in ("33,015,546,816", "7,349", "608,879,616", "708", "20,480"):
        assert number in text
    assert max(map(len, text.splitlines())) <= 100
    assert main(["show", "nano-omni", "--tiny"]) == 0
    assert "shrunk" in capsys.readouterr().out


@pytest.mark.parametrize("model", [NANO_OMNI, get_omni("nano-omni-tiny")], ids=lambda model: model.name)
def test_modules_are_those_of_transformers(model: OmniConfig) -> None:
    """Names and shapes of every parameter and buffer; RADIO's scales of layers are 1 and are not stored."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers.models.radio")
    from transformers import ParakeetEncoder, RadioModel

    from megatron_nemotron3.models.omni_tensors import MODULES, rows, symbol_sizes
    from megatron_nemotron3.train.omni.encoders import parakeet_config, radio_config

    assert model.sound is not None
    with torch.device("meta"):
        radio, parakeet = (
            RadioModel(radio_config(model.vision)),
            ParakeetEncoder(parakeet_config(model.sound)),
        )
    constants = ("layer_scale", "summary_idxs", "input_conditioner")
    for part, module in (("vision encoder", radio), ("sound encoder", parakeet)):
        sizes = symbol_sizes(model, part)
        ours = {
            tensor.name: tuple(sizes[symbol] for symbol in tensor.shape)
            for row in rows(model, part)
            for tensor in row.spelling(MODULES).tensors
        }
        theirs = {
            name: tuple(t.shape)
            for name, t in module.state_dict().items()
            if not any(word in name for word in constants)
        }
        assert ours == theirs


def test_saved_names() -> None:
    """What transformers writes for a tiny model, and what it adds of its own."""
    pytest.importorskip("transformers.models.nemotron_h_omni")
    import tempfile
    from pathlib import Path

    from safetensors import safe_open

    from tests.support.omni_oracle import transformers_omni

    small = get_omni("nano-omni-tiny")
    assert small is not None
    with tempfile.TemporaryDirectory() as folder:
        transformers_omni(small).save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            theirs = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
        assert json.loads((Path(folder) / "config.json").read_text())["model_type"] == "nemotron_h_omni"
    ours = {t.name: t.shape for part in PARTS for t in encoder_tensors(small, part)}
    encoders = {name: shape for name, shape in theirs.items() if not name.startswith("language_model.")}
    extra = {
        name for name in encoders.keys() - ours.keys() if "layer_scale" in name or "summary_idxs" in name
    }
    assert {name: shape for name, shape in encoders.items() if name not in extra} == ours
    assert len(theirs) - len(encoders) == stored_tensors(small.language)


def test_positions_of_sound_stay_exact_in_bfloat16() -> None:
    """As transformers computes them; `bfloat16()` of its module, which Megatron calls, rounds them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers.models.radio")
    from transformers import ParakeetEncoder

    from megatron_nemotron3.train.omni.encoders import SoundEncoder

    small = get_omni("nano-omni-tiny")
    assert small is not None and small.sound is not None
    encoder = SoundEncoder(small.sound)
    exact = ParakeetEncoder(encoder.config).encode_positions.inv_freq
    found = torch.nn.ModuleList([encoder]).bfloat16()[0]
    assert found.layers[0].conv.norm.running_mean.dtype == torch.bfloat16
    assert torch.equal(found.encode_positions.inv_freq, exact)
    rounded = ParakeetEncoder(encoder.config).bfloat16().encode_positions.inv_freq
    assert not torch.equal(rounded.float(), exact)
