"""MTP of the original put back onto a fine-tune that lost it, and conversion without MTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert.checkpoints import open_megatron
from megatron_nemotron3.models import Nemotron3Config, get
from tests.support.hf_folders import hf_values, read_hf, write_hf

Capture = pytest.CaptureFixture[str]
SUPER = get("super-tiny").but(pattern="M*E", hidden_size=64, vocab_size=256, num_moe_experts=8)
#: Two blocks of two layers each.
TWICE = SUPER.but(mtp_use_repeated_layer=False, mtp_pattern="*-", dense_ffn_hidden_size=96)


def tune(folder: Path, original: Path) -> dict[str, torch.Tensor]:
    """What transformers saves of the original after other weights were put into it: no MTP."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype="auto")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(folder)
    tuned = read_hf(folder)
    assert not any(name.startswith("mtp.") for name in tuned)
    return tuned


def heads(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if name.startswith("mtp.")}


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.mark.parametrize("config", [SUPER, TWICE], ids=["one block", "two blocks"])
@pytest.mark.parametrize("kind", ["folder", "file", "folder of MTP", "folder without its weights"])
def test_put_back(config: Nemotron3Config, kind: str, tmp_path: Path, capsys: Capture) -> None:
    values = write_hf(tmp_path / "original", config, files=3)
    tuned = tune(tmp_path / "tuned", tmp_path / "original")
    place = tmp_path / "original"
    if kind != "folder":
        (tmp_path / "mtp").mkdir()
        save_file(heads(values), tmp_path / "mtp/heads.safetensors")
        place = tmp_path / "mtp" / ("heads.safetensors" if kind == "file" else "")
    if kind == "folder without its weights":
        (place / "config.json").write_bytes((tmp_path / "original/config.json").read_bytes())
    capsys.readouterr()
    assert run("convert", "from-hf", tmp_path / "tuned", tmp_path / "m") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--mtp-from DIR takes them from there, --mtp-num-layers 0 converts without MTP" in line
    assert run("convert", "from-hf", tmp_path / "tuned", tmp_path / "m", "--mtp-from", place) == 0
    assert f"mtp          its tensors are those of {place}" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "m/nemotron3_manifest.json").read_text())
    assert manifest["mtp_from"] == str(place)
    assert run("convert", "to-hf", tmp_path / "m", tmp_path / "back") == 0
    found, expected = read_hf(tmp_path / "back"), tuned | heads(values)
    renamed = {name.replace("embedding.w", "embeddings.w"): value for name, value in expected.items()}
    assert found.keys() == renamed.keys() and all(found[name].equal(renamed[name]) for name in found)
    made = open_megatron(tmp_path / "m").config
    assert (made.mtp_pattern, made.mtp_num_blocks) == (config.mtp_pattern, config.mtp_num_blocks)
    if "folder" in kind and kind != "folder of MTP":  # its config.json says how often the block is applied
        assert made.mtp_num_layers == config.mtp_num_layers
    assert run("verify", tmp_path / "tuned", tmp_path / "m", "--mtp-from", place) == 0
    assert run("verify", tmp_path / "tuned", tmp_path / "m", "--mtp-num-layers", 0) == 1


def test_without(tmp_path: Path, capsys: Capture) -> None:
    """Of a folder that has lost MTP, and of one that has it."""
    values = write_hf(tmp_path / "original", SUPER)
    tune(tmp_path / "tuned", tmp_path / "original")
    for name, left in (("tuned", 0), ("original", len(heads(values)))):
        target = tmp_path / f"{name}-m"
        assert run("convert", "from-hf", tmp_path / name, target, "--mtp-num-layers", 0) == 0
        assert (f"left out     {left} MTP tensors" in capsys.readouterr().out) == bool(left)
        config = open_megatron(target).config
        assert not config.has_mtp and config.pattern == SUPER.pattern
        assert run("verify", tmp_path / name, target, "--mtp-num-layers", 0) == 0
    assert run("convert", "to-hf", tmp_path / "original-m", tmp_path / "back") == 0
    found = read_hf(tmp_path / "back")
    assert found.keys() == values.keys() - heads(values).keys()
    stated = json.loads((tmp_path / "back/config.json").read_text())
    assert not stated.get("num_nextn_predict_layers")


def test_the_heads_of_a_fine_tune_with_more_tokens(tmp_path: Path) -> None:
    """The embedding is the fine-tune's; the heads have no rows of the vocabulary."""
    values = write_hf(tmp_path / "original", SUPER)
    more = SUPER.but(vocab_size=SUPER.vocab_size + 8)
    tuned = {name: v for name, v in hf_values(more, seed=1).items() if not name.startswith("mtp.")}
    write_hf(tmp_path / "tuned", more, values=tuned)
    words = ("convert", "from-hf", tmp_path / "tuned", tmp_path / "m", "--mtp-from", tmp_path / "original")
    assert run(*words) == 0
    assert run("convert", "to-hf", tmp_path / "m", tmp_path / "back") == 0
    found, expected = read_hf(tmp_path / "back"), tuned | heads(values)
    assert found.keys() == expected.keys() and all(found[n].equal(expected[n]) for n in found)


OTHER = SUPER.but(moe_ffn_hidden_size=32)


def _without_first(path: Path) -> None:
    save_file({n: v for n, v in heads(hf_values(SUPER)).items() if "eh_proj" not in n}, path)


@pytest.mark.parametrize(
    ("change", "place", "message"),
    [
        (lambda at: None, "nowhere", "nowhere: it does not exist"),
        (lambda at: (at / "empty").mkdir(), "empty", "it has no safetensors files"),
        (
            lambda at: write_hf(at / "other", OTHER),
            "other",
            "it is not the model .*: moe_ffn_hidden_size=32 (expected 96)",
        ),
        (
            lambda at: write_hf(at / "plain", SUPER.but(mtp_pattern=None, mtp_num_layers=0)),
            "plain",
            "no tensor in it is of MTP",
        ),
        (
            lambda at: save_file(heads(hf_values(OTHER)), at / "heads.safetensors"),
            "heads.safetensors",
            "tensors have another shape, first 'mtp.layers.1.mixer.experts.0.up_proj.weight': [32, ",
        ),
        (
            lambda at: _without_first(at / "cut.safetensors"),
            "cut.safetensors",
            "its layers '*E' are no blocks that each begin with eh_proj (0 of them)",
        ),
        (lambda at: write_hf(at / "tuned/more", SUPER), "tuned", "no tensor in it is of MTP"),
    ],
)  # fmt: skip
def test_refused(change: Any, place: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    values = hf_values(SUPER)
    tuned = {name: value for name, value in values.items() if name not in heads(values)}
    write_hf(tmp_path / "tuned", SUPER, values=tuned)
    change(tmp_path)
    words = ("convert", "from-hf", tmp_path / "tuned", tmp_path / "m", "--mtp-from", tmp_path / place)
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), line), line
    assert not (tmp_path / "m").exists() and not (tmp_path / "m.partial").exists()


def test_options_that_contradict(tmp_path: Path, capsys: Capture) -> None:
    write_hf(tmp_path / "hf", SUPER)
    words = ("convert", "from-hf", tmp_path / "hf", tmp_path / "m", "--mtp-from", tmp_path / "hf")
    assert run(*words) == 2
    assert re.search(r"hf has \d+ tensors of MTP itself: leave it out", capsys.readouterr().err)
    assert run(*words, "--mtp-num-layers", 0) == 2
    assert "--mtp-from and --mtp-num-layers 0: give one of them" in capsys.readouterr().err


def test_logits_with_heads_of_another(tmp_path: Path, capsys: Capture) -> None:
    """--check-logits takes MTP from the converted checkpoint's model, whose config.json lacks it."""
    write_hf(tmp_path / "original", SUPER, dtype="float32")
    values = hf_values(SUPER, seed=2, dtype="float32")
    plain = SUPER.but(mtp_pattern=None, mtp_num_layers=0)
    tuned = {name: value for name, value in values.items() if name not in heads(values)}
    write_hf(tmp_path / "tuned", plain, values=tuned, dtype="float32")
    words = ["convert", "from-hf", tmp_path / "tuned", tmp_path / "m", "--mtp-from", tmp_path / "original"]
    assert run(*words, "--check-logits", 20) == 0, capsys.readouterr()
