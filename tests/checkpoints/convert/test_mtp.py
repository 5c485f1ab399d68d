"""MTP in Hugging Face's format, which stores blocks and no depths, and often loses both.

The heads of the original are put back onto a fine-tune that lost them, or are left out; how often a block is
applied survives a round trip.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face, open_megatron
from megatron_nemotron3.checkpoints.convert.config_json import write
from megatron_nemotron3.checkpoints.convert.config_keys import OWN
from megatron_nemotron3.checkpoints.state import read_arguments
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from tests.support.counted_job import digest
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


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (TWICE, "folder"),
        *((SUPER, kind) for kind in ("file", "folder of MTP", "folder without its weights")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
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
    assert run("convert", "verify", tmp_path / "tuned", tmp_path / "m", "--mtp-from", place) == 0
    assert run("convert", "verify", tmp_path / "tuned", tmp_path / "m", "--mtp-num-layers", 0) == 1


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
        assert run("convert", "verify", tmp_path / name, target, "--mtp-num-layers", 0) == 0
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


WHOLE = tiny(get("super"))
#: In no catalog.
UNKNOWN = WHOLE.but(name="other", pattern="M*E", mtp_num_layers=3, mtp_loss_scaling_factor=0.25)


def command(capsys: Capture, *words: object) -> str:
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def without_key(folder: Path) -> Path:
    """As a release, or an export of an earlier version."""
    data = json.loads((folder / "config.json").read_text())
    del data[OWN]
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def arguments(folder: Path) -> dict[str, object]:
    return read_arguments(folder / "release")


@pytest.mark.parametrize(
    "config",
    [UNKNOWN, UNKNOWN.but(mtp_use_repeated_layer=False)],
    ids=["one block", "a block per depth"],
)
def test_round_trip(config: Nemotron3Config, tmp_path: Path, capsys: Capture) -> None:
    """Megatron, Hugging Face, Megatron: the same bytes, stored arguments included."""
    write_hf(tmp_path / "hf", config)
    one = ("--workers", 1)
    command(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "a", *one)
    out = command(capsys, "convert", "to-hf", tmp_path / "a", tmp_path / "b", *one)
    assert f"mtp          depths: {config.mtp_num_layers}, stored blocks: {config.mtp_num_blocks}" in out
    out = command(capsys, "convert", "from-hf", tmp_path / "b", tmp_path / "c", *one)
    assert f"; by {OWN} in config.json" in out
    stored = arguments(tmp_path / "c")
    assert stored["hybrid_layer_pattern"] == config.full_pattern
    for field in ("mtp_num_layers", "mtp_use_repeated_layer", "mtp_loss_scaling_factor"):
        assert stored[field] == getattr(config, field)
    first, last = (digest(tmp_path / name) for name in "ac")
    for files in (first, last):
        del files["nemotron3_manifest.json"]  # names its source
    assert first == last


def test_without_the_key(tmp_path: Path, capsys: Capture) -> None:
    """The catalog says it for its models, an option or --model for others; else one depth, and a line."""
    write_hf(tmp_path / "super", WHOLE)
    write_hf(tmp_path / "other", UNKNOWN)
    for name, words, depths, said in (
        ("super", [], 2, "the catalog, for super-tiny or ultra-tiny; config.json does not say"),
        ("super", ["--mtp-num-layers", 4], 4, "--mtp-num-layers"),
        ("super", ["--model", "super", "--tiny"], 2, "--model super-tiny"),
        ("other", [], 1, "the stored blocks; config.json does not say (--mtp-num-layers N)"),
        ("other", ["--mtp-num-layers", 5], 5, "--mtp-num-layers"),
    ):
        folder = tmp_path / name
        if OWN in json.loads((folder / "config.json").read_text()):
            without_key(folder)
        out = command(capsys, "convert", "from-hf", folder, tmp_path / "out", *words, "--workers", 1)
        assert f"mtp          depths: {depths}, stored blocks: 1; by {said}\n" in out
        assert arguments(tmp_path / "out")["mtp_num_layers"] == depths
        pattern = f"{(WHOLE if name == 'super' else UNKNOWN).pattern}{'/*E' * depths}"
        assert arguments(tmp_path / "out")["hybrid_layer_pattern"] == pattern
        shutil.rmtree(tmp_path / "out")


def test_contradictions(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", UNKNOWN)
    path = tmp_path / "hf/config.json"
    data = json.loads(path.read_text())
    for own, message in (
        ([2], "is a list, expected an object"),
        ({"mtp_num_layers": 0}, "says 0 MTP depths"),
        ({"mtp_num_layers": "2"}, "mtp_num_layers='2' is not a int"),
        ({"mtp_num_layers": True}, "mtp_num_layers=True is not a int"),
        ({"mtp_num_layers": 1 << 40}, "is not a int from 0 to 65,535"),
        ({"mtp_num_layers": 2, "mtp_use_repeated_layer": False}, "2 MTP depths, a block each, but num_next"),
    ):
        path.write_text(json.dumps(data | {OWN: own}))
        with pytest.raises(ValueError, match=re.escape(message)):
            open_hugging_face(tmp_path / "hf")
    path.write_text(json.dumps(data | {OWN: {"mtp_num_layers": 7, "new": 1}}))
    assert open_hugging_face(tmp_path / "hf").config.mtp_num_layers == 7
    opened = open_hugging_face(tmp_path / "hf", model=UNKNOWN)
    assert opened.mtp_source == "--model other; config.json says 7" and opened.config.mtp_num_layers == 3
    with pytest.raises(ValueError, match=r"--mtp-num-layers -1: .* has 1 MTP block"):
        open_hugging_face(tmp_path / "hf", mtp_num_layers=-1)


def test_transformers_ignores_the_key(tmp_path: Path) -> None:
    """It is kept by from_pretrained, and changes no output."""
    transformers = pytest.importorskip("transformers")
    data = write(WHOLE.but(pattern="M*E"))
    outputs = []
    for name, content in (("with", data), ("without", {k: v for k, v in data.items() if k != OWN})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert getattr(config, OWN, None) == content.get(OWN)
        config.save_pretrained(tmp_path / name / "again")
        assert json.loads((tmp_path / name / "again/config.json").read_text()).get(OWN) == content.get(OWN)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            outputs.append(model(torch.arange(16)[None]).logits)
    assert outputs[0].equal(outputs[1])
