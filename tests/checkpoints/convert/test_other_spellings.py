"""Hugging Face folders as other programs leave them: other names of tensors, files beside the index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.models import get
from tests.support.hf_folders import read_hf, write_hf

Capture = pytest.CaptureFixture[str]
NANO = get("nano-tiny").but(pattern="M*E")
SUPER = get("super-tiny").but(pattern="M*E")


def status(*words: object) -> int:
    return cli.main([str(word) for word in words])


def test_a_folder_that_transformers_saved_of_a_model_made_from_its_configuration(tmp_path: Path) -> None:
    """5.15.1 writes backbone.embedding.weight; whatever it writes, the values are those of its modules."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.NemotronHConfig.from_dict(config_json.write(NANO))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    assert status("convert", "from-hf", tmp_path / "hf", tmp_path / "m") == 0
    assert status("convert", "to-hf", tmp_path / "m", tmp_path / "back") == 0
    found = read_hf(tmp_path / "back")
    assert found["backbone.embeddings.weight"].equal(model.model.embeddings.weight)
    assert found["backbone.norm_f.weight"].equal(model.model.norm_f.weight)
    assert found["backbone.layers.0.mixer.A_log"].equal(model.model.layers[0].mixer.A_log)


@pytest.mark.parametrize("name", ["nano-tiny", "puzzle-tiny"])
@pytest.mark.parametrize(
    "roots", [("model", "embeddings"), ("backbone", "embedding"), ("model", "embedding")]
)
def test_all_spellings_are_the_same_tensors(name: str, roots: tuple[str, str], tmp_path: Path) -> None:
    config = get(name)
    values = write_hf(tmp_path / "hf", config)
    own = "model" if config.moe_layers else "backbone"
    root, embedding = roots
    spelled = {
        key.replace(f"{own}.", f"{root}.", 1).replace(".embeddings.", f".{embedding}."): value
        for key, value in values.items()
    }
    assert spelled.keys() != values.keys() or roots == (own, "embeddings")
    save_file(spelled, tmp_path / "hf/model.safetensors")
    assert status("convert", "from-hf", tmp_path / "hf", tmp_path / "m") == 0
    assert status("verify", tmp_path / "hf", tmp_path / "m") == 0
    assert status("convert", "to-hf", tmp_path / "m", tmp_path / "back") == 0
    found = read_hf(tmp_path / "back")
    assert found.keys() == values.keys() and all(found[key].equal(values[key]) for key in values)


def test_one_tensor_under_two_names(tmp_path: Path, capsys: Capture) -> None:
    values = write_hf(tmp_path / "hf", NANO)
    values["backbone.embedding.weight"] = values["backbone.embeddings.weight"].clone()
    save_file(values, tmp_path / "hf/model.safetensors")
    assert status("convert", "from-hf", tmp_path / "hf", tmp_path / "m") == 2
    assert "'backbone.embeddings.weight' are the same tensor" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "convert"])
def test_one_file_beside_an_index_of_others_is_refused(command: str, tmp_path: Path, capsys: Capture) -> None:
    """transformers reads the one file, and we would read the index."""
    values = write_hf(tmp_path / "hf", NANO, files=3)
    save_file({key: value + 1 for key, value in values.items()}, tmp_path / "hf/model.safetensors")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours = values["backbone.norm_f.weight"]
    assert theirs.model.norm_f.weight.equal(ours + 1) and not theirs.model.norm_f.weight.equal(ours)
    words = ("from-hf", tmp_path / "hf", tmp_path / "m") if command == "convert" else (tmp_path / "hf",)
    capsys.readouterr()
    assert status(command, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "it has model.safetensors, which transformers reads, and model.safetensors.index.json with 3" in line
    )
    # An index that names it is no contradiction.
    shutil.rmtree(tmp_path / "hf")
    write_hf(tmp_path / "hf", NANO)
    index = {"metadata": {}, "weight_map": dict.fromkeys(values, "model.safetensors")}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    assert status("check", tmp_path / "hf") == 0


def test_mtp_in_a_file_of_its_own_is_named(tmp_path: Path, capsys: Capture) -> None:
    values = write_hf(tmp_path / "hf", SUPER)
    mtp = {key: value for key, value in values.items() if key.startswith("mtp.")}
    save_file(
        {key: value for key, value in values.items() if key not in mtp}, tmp_path / "hf/model.safetensors"
    )
    save_file(mtp, tmp_path / "hf/mtp.safetensors")
    assert status("check", tmp_path / "hf") == 2
    (line,) = capsys.readouterr().err.splitlines()
    file = tmp_path / "hf/mtp.safetensors"
    assert f"{file}, which no index lists, has MTP: --mtp-from {file}" in line
    data = json.loads((tmp_path / "hf/config.json").read_text())
    without = {key: value for key, value in data.items() if "mtp" not in key and "nextn" not in key}
    without.pop("megatron_nemotron3")
    (tmp_path / "hf/config.json").write_text(json.dumps(without))
    assert status("check", tmp_path / "hf") == 0
    out = capsys.readouterr().out
    assert f"mtp.safetensors: no index lists it (its {len(mtp)} tensors of MTP: --mtp-from {file})" in out
