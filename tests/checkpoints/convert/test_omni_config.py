"""config.json of Omni folders, as transformers and released files have it, and folders that are refused."""

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
from megatron_nemotron3.checkpoints.convert.omni_config import is_omni, omni_config, omni_json, pruning_note
from megatron_nemotron3.models.omni import NANO_OMNI, OmniConfig, tiny
from tests.support import omni_checkpoints as folders
from tests.support.hf_folders import omni_tensors, write_hf
from tests.support.omni_checkpoints import nemotron3
from tests.support.omni_oracle import transformers_omni_config

TINY = tiny(NANO_OMNI)


def written(config: OmniConfig, folder: Path) -> dict[str, Any]:
    """What transformers writes for a model."""
    transformers_omni_config(config).save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


#: Keys of the released folder, as public programs read them.
RELEASED: dict[str, Any] = {
    "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
    "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
    "auto_map": {"AutoConfig": "configuration.X"},
    "force_image_size": 512,
    "patch_size": 16,
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "use_thumbnail": True,
    "img_context_token": "<image>",
    "img_context_token_id": 18,
    "sound_context_token": "<so_embedding>",
    "sound_context_token_id": 27,
    "vit_hidden_size": 1280,
    "projector_hidden_size": 20480,
    "norm_mean": [0.5, 0.5, 0.5],
    "norm_std": [0.5, 0.5, 0.5],
    "vision_config": {
        "version": "radio_v2.5-h",
        "patch_size": 16,
        "max_resolution": 2048,
        "separate_video_embedder": True,
        "video_temporal_patch_size": 2,
        "args": {"model": "vit_huge_patch16_224", "cpe_max_size": 2048, "lr": 0.1},
    },
    "sound_config": {
        "model_type": "parakeet",
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "intermediate_size": 4096,
        "conv_kernel_size": 9,
        "convolution_bias": False,
        "subsampling_conv_channels": 256,
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
        "subsampling_factor": 8,
        "num_mel_bins": 128,
        "projection_hidden_size": 4096,
        "projection_bias": False,
        "sampling_rate": 16000,
    },
}


@pytest.mark.parametrize("config", [NANO_OMNI, TINY], ids=lambda c: c.name)
def test_what_transformers_writes_is_the_model(config: OmniConfig, tmp_path: Path) -> None:
    data = written(config, tmp_path)
    assert is_omni(data)
    found = omni_config(data)
    assert found.encoders_json() == config.encoders_json()
    assert (found.name, found.language.name) == (config.name, config.language.name)
    assert omni_config(omni_json(config)).encoders_json() == config.encoders_json()


def test_what_is_written_is_transformers_model(tmp_path: Path) -> None:
    """transformers reads both files to the same configuration, what it only derives or ignores aside."""
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(omni_json(TINY, dtype="float32")))
    read, made = AutoConfig.from_pretrained(tmp_path).to_dict(), transformers_omni_config(TINY).to_dict()
    for part in ("vision_config", "audio_config"):
        dropout = [key for key in made[part] if "drop" in key]
        for key in set(made[part]) - {"transformers_version", "dtype", *dropout}:
            assert read[part][key] == made[part][key], (part, key)
    for key in set(made) - {"text_config", "vision_config", "audio_config", "dtype", "_name_or_path"}:
        assert read.get(key) == made[key] or key in ("architectures",), key
    assert read["text_config"]["layers_block_type"] == made["text_config"]["layers_block_type"]


def test_the_released_names_are_the_same_model(tmp_path: Path) -> None:
    data = {**RELEASED, "llm_config": written(NANO_OMNI, tmp_path)["text_config"]}
    assert omni_config(data) == omni_config(written(NANO_OMNI, tmp_path))


def test_a_reference_is_kept(tmp_path: Path) -> None:
    """Token texts, preprocessing and code survive; another model is named."""
    data = {**RELEASED, "llm_config": written(NANO_OMNI, tmp_path)["text_config"]}
    found = omni_json(NANO_OMNI, reference=data)
    assert {key: found[key] for key in RELEASED} == RELEASED
    assert found["llm_config"]["hidden_size"] == NANO_OMNI.language.hidden_size and "text_config" not in found
    with pytest.raises(ValueError, match=r"not the model nano-omni: .*vision\.num_layers=2"):
        omni_json(TINY, reference=data)


def test_without_sound(tmp_path: Path) -> None:
    data = written(TINY, tmp_path)
    data |= {"audio_config": None, "audio_token_id": None}
    found = omni_config(data)
    assert found.sound is None and found.sound_token_id is None
    assert omni_config(omni_json(found)) == found


def test_pruning_is_told() -> None:
    assert pruning_note({"video_pruning_rate": 0.0}) is None
    assert "video_pruning_rate=0.7" in (pruning_note({"video_pruning_rate": 0.7}) or "")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("", {"model_type": "llava"}, "model_type='llava': not a Nemotron Omni model"),
        ("", {"tower_size": 3}, "1 unknown keys: tower_size"),
        ("", {"text_config": None}, "no text_config"),
        ("", {"vision_config": 3}, "vision_config is a int"),
        ("", {"image_token_id": None}, "no image_token_id or img_context_token_id"),
        ("", {"img_context_token_id": 19}, "image_token_id=18, img_context_token_id=19 contradict"),
        ("vision_config", {"hidden_size": 10**400}, "is no whole number"),
        ("", {"vision_hidden_size": 65}, "vision_hidden_size=65, but vision_config has hidden_size=64"),
        ("", {"downsample_ratio": 0.3}, "downsample_ratio=0.3: give"),
        ("", {"ps_version": "v1"}, "ps_version='v1' cannot be built"),
        ("", {"video_temporal_patch_size": 4}, "video_temporal_patch_size=4, but vision_config has 2"),
        ("text_config", {"n_routed_experts": None}, "no n_routed_experts"),
        ("vision_config", {"window": 7}, "1 unknown keys: vision_config.window"),
        ("vision_config", {"use_swiglu_ffn": True}, "use_swiglu_ffn=True cannot be built"),
        ("vision_config", {"mlp_ratio": 4.01}, "mlp_ratio=4.01"),
        ("vision_config", {"args": {"model": "vit_small"}}, "args.model='vit_small': known is"),
        ("vision_config", {"num_attention_heads": 5}, "no multiple of its 5 heads"),
        ("audio_config", {"projection_hidden_size": None}, "no projection_hidden_size"),
        ("audio_config", {"subsampling_factor": 6}, "subsampling_factor=6: give a power of 2"),
    ],
)
def test_refused_by_name(part: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = written(TINY, tmp_path)
    (data[part] if part else data).update(change)
    with pytest.raises(ValueError, match=".*") as caught:
        omni_config(data)
    assert message in str(caught.value) and "\n" not in str(caught.value)


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
