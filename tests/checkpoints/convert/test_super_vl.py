"""Super VL in both directions: no sound, MTP in the language model, a norm behind the vision encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.config_keys import OWN
from megatron_nemotron3.checkpoints.convert.omni_config import omni_config, omni_json
from megatron_nemotron3.checkpoints.metadata import read_metadata
from megatron_nemotron3.models import SUPER
from megatron_nemotron3.models.omni import SUPER_VL, tiny
from megatron_nemotron3.models.omni_tensors import released_tensors
from tests.support import omni_checkpoints as folders
from tests.support.checkpoint_writer import same_bytes
from tests.support.engines import tensors as language_tensors
from tests.support.hf_folders import omni_tensors
from tests.support.omni_checkpoints import is_scale, nemotron3, tensors
from tests.support.omni_folders import oracle
from tests.support.omni_oracle import transformers_omni_config, without_mtp

MODEL = tiny(SUPER_VL)
NORM = "vision_projector.vision_final_layernorm.weight"
START = "language_model."
INPUT = "vision_model.radio_model.input_conditioner."


def released(language: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """config.json by the names of the released folder."""
    return {
        "architectures": ["NemotronH_Omni_Reasoning_V3"],
        "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h_omni.NemotronH_Omni_Reasoning_V3"},
        "model_type": "nemotron_h_omni",
        "img_context_token_id": MODEL.image_token_id,
        "sound_config": None,
        "sound_context_token_id": None,
        "video_temporal_patch_size": 2,
        "video_pruning_rate": 0.7,
        "downsample_ratio": 0.5,
        "vit_hidden_size": MODEL.vision.hidden_size,
        "projector_hidden_size": MODEL.vision_projector_size,
        "llm_config": language,
        "vision_config": vision | {"summary_idxs": [0, 1]},
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf: as the release; megatron, back: what the command makes of it."""
    folder = tmp_path_factory.mktemp("super_vl")
    model = oracle(MODEL, 5)
    model.save_pretrained(folder / "saved")
    values = {name: value for name, value in tensors(folder / "saved").items() if not is_scale(name)}
    values |= {START + name: value for name, value in language_tensors(MODEL.language, 5).items()}
    values |= {INPUT + name: torch.rand(3, 1, 1) for name in ("norm_mean", "norm_std")}
    values["vision_model.summary_idxs"] = torch.tensor([0, 1])
    hf = folder / "hf"
    hf.mkdir()
    save_file(values, hf / "model.safetensors", {"format": "pt"})
    made = omni_json(MODEL, dtype="float32")
    del made["text_config"][OWN]
    data = released(made["text_config"], made["vision_config"])
    (hf / "config.json").write_text(json.dumps(data))
    assert nemotron3("convert", "from-hf", hf, folder / "megatron", "--workers", 1) == 0
    assert nemotron3("convert", "to-hf", folder / "megatron", folder / "back", "--workers", 2) == 0
    return folder


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not same_bytes(found[name], expected[name])]


def test_the_release() -> None:
    """Megatron-Bridge's card: 43,079 tensors, 248,906,833,960 bytes. MTP is one block, nested."""
    found = omni_tensors(SUPER_VL)
    assert len(found) + 3 == 43_079 == released_tensors(SUPER_VL)
    sizes = {"bfloat16": 2, "float32": 4}
    stored = sum(torch.Size(t.shape).numel() * sizes[t.dtype] for t in found)
    constants = 2 * 3 * 4 + 2 * 8  # mean and deviation of three colors in FP32, two places in int64
    assert stored + constants == 248_906_833_960
    mtp = [t.name for t in found if ".mtp." in t.name]
    assert len(mtp) == 1040 and {name.split(".")[3] for name in mtp} == {"0", "1"}
    assert all(name.startswith("language_model.mtp.layers.") for name in mtp)


def test_back_to_the_same_bits(place: Path, tmp_path: Path) -> None:
    """Every tensor of the release, with the dialect of its config.json where it is given."""
    equal(tensors(place / "back"), tensors(place / "hf"))
    found = omni_config(json.loads((place / "back/config.json").read_text()))
    assert (found.name, found.encoders_json()) == (MODEL.name, MODEL.encoders_json())
    # One block is stored, and Megatron applies it at two depths.
    assert (found.language.mtp_num_blocks, found.language.mtp_num_layers) == (1, 2)
    reference = ("--reference", place / "hf", "--workers", 1)
    assert nemotron3("convert", "to-hf", place / "megatron", tmp_path / "hf", *reference) == 0
    equal(tensors(tmp_path / "hf"), tensors(place / "hf"))
    before, after = (json.loads((f / "config.json").read_text()) for f in (place / "hf", tmp_path / "hf"))
    assert before.pop("llm_config").items() <= after.pop("llm_config").items() and after == before
    names = read_metadata(place / "megatron/release").tensors
    assert "modality_submodules.vision.encoders.radio.final_layernorm.weight" in names
    assert "modality_submodules.vision.encoders.radio.summary_idxs" in names
    assert not any(".sound." in name for name in names)


def test_transformers_reads_what_comes_back(place: Path, tmp_path: Path) -> None:
    """Without the constants it gets transformers' own tensors; the norm arrives."""

    def change(values: dict[str, torch.Tensor]) -> None:
        for name in [n for n in values if n.startswith(INPUT) or is_scale(n)]:
            del values[name]

    hf = folders.rewritten(place / "hf", tmp_path / "plain", change)
    assert nemotron3("convert", "from-hf", hf, tmp_path / "megatron", "--workers", 1) == 0
    assert nemotron3("convert", "to-hf", tmp_path / "megatron", tmp_path / "hf", "--workers", 1) == 0
    model, said = folders.from_transformers(tmp_path / "hf")
    # MTP is the only part that transformers leaves out.
    assert all(".mtp." in f".{name}" for name in said.pop("unexpected_keys"))
    assert not any(said.values()), said
    assert torch.equal(model.vision_final_layernorm.weight, tensors(place / "hf")[NORM])


def test_the_language_model_alone(place: Path, tmp_path: Path) -> None:
    """It is Super with its MTP; put back in, it changes nothing else."""
    only = ("--only", "language", "--workers", 1)
    assert nemotron3("convert", "from-hf", place / "hf", tmp_path / "megatron", *only) == 0
    assert nemotron3("convert", "to-hf", place / "megatron", tmp_path / "hf", *only) == 0
    assert nemotron3("convert", "verify", tmp_path / "megatron", tmp_path / "hf", "--workers", 1) == 0
    whole = tensors(place / "hf")
    equal(
        tensors(tmp_path / "hf"), {n.removeprefix(START): t for n, t in whole.items() if n.startswith(START)}
    )
    opened = open_checkpoint(tmp_path / "megatron")
    assert f"{SUPER.name}-tiny" in opened.config.name and opened.config.mtp_num_layers == 2
    into = (*only, "--into", place / "megatron")
    assert nemotron3("convert", "from-hf", tmp_path / "hf", tmp_path / "put", *into) == 0
    assert nemotron3("convert", "verify", tmp_path / "put", place / "hf", "--workers", 1) == 0


def test_what_transformers_writes_is_the_model(tmp_path: Path) -> None:
    for model in (SUPER_VL, MODEL):
        transformers_omni_config(model).save_pretrained(tmp_path)
        found = omni_config(json.loads((tmp_path / "config.json").read_text()))
        assert (found.name, found.encoders_json()) == (model.name, model.encoders_json())


def test_a_norm_without_mtp_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """config.json has no key for the norm: transformers builds it where MTP is stated."""
    with pytest.raises(ValueError, match="final_layernorm=True of vision, and MTP is False"):
        omni_json(without_mtp(MODEL))
    data = json.loads((place / "hf/config.json").read_text())
    data["llm_config"]["num_nextn_predict_layers"] = 0
    hf = folders.rewritten(place / "hf", tmp_path / "hf", lambda values: None, **data)
    capsys.readouterr()
    assert nemotron3("convert", "from-hf", hf, tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert "do not belong to the model" in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_depths_of_mtp(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One stored block; where no catalog knows the model, --mtp-num-layers says how often it is applied."""
    convert = ("convert", "from-hf", place / "hf", tmp_path / "out", "--workers", 1)
    assert nemotron3(*convert, "--dry-run") == 0
    assert "depths: 2, stored blocks: 1; by the catalog, for super" in capsys.readouterr().out
    assert nemotron3(*convert, "--dry-run", "--mtp-num-layers", 3) == 0
    assert "depths: 3, stored blocks: 1; by --mtp-num-layers" in capsys.readouterr().out
    assert nemotron3(*convert, "--mtp-num-layers", 0) == 2
    assert "--mtp-num-layers 0: it is for language models" in capsys.readouterr().err


def test_mtp_is_put_back(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fine-tune that transformers saved has none. The release has it, also for a model of text."""

    def change(values: dict[str, torch.Tensor]) -> None:
        for name in [n for n in values if ".mtp." in n]:
            del values[name]
        values["language_model.lm_head.weight"] += 1

    tuned = folders.rewritten(place / "hf", tmp_path / "tuned", change)
    target = tmp_path / "megatron"
    capsys.readouterr()
    assert nemotron3("convert", "from-hf", tuned, target) == 2
    assert "all are of MTP" in capsys.readouterr().err
    given = ("--mtp-from", place / "hf", "--workers", 1)
    assert nemotron3("convert", "from-hf", tuned, target, *given) == 0
    assert f"mtp          its tensors are those of {place / 'hf'}" in capsys.readouterr().out
    assert nemotron3("convert", "verify", tuned, target, *given) == 0
    assert nemotron3("convert", "to-hf", target, tmp_path / "back", "--workers", 1) == 0
    expected = tensors(place / "hf")
    expected["language_model.lm_head.weight"] += 1
    equal(tensors(tmp_path / "back"), expected)
    only = (*given, "--only", "language")
    assert nemotron3("convert", "from-hf", tuned, tmp_path / "language", *only) == 0
    assert open_checkpoint(tmp_path / "language").config.mtp_num_layers == 2
    # A text model's fine-tune takes it from the released folder with encoders, too.
    words = ("convert", "to-hf", place / "megatron", tmp_path / "text", "--only", "language", "--workers", 1)
    assert nemotron3(*words) == 0
    lost = folders.rewritten(
        tmp_path / "text", tmp_path / "lost", lambda v: [v.pop(n) for n in list(v) if n.startswith("mtp.")]
    )
    assert nemotron3("convert", "from-hf", lost, tmp_path / "put", *given) == 0


def test_training_with_mtp_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert nemotron3("flags", "super-vl") == 2
    err = capsys.readouterr().err
    assert "MIMO model trains no MTP" in err and "--only language" in err and err.count("\n") == 1
