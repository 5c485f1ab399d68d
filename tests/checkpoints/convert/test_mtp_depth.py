"""How many depths MTP has survives Hugging Face's format, which stores blocks and no depths."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face
from megatron_nemotron3.checkpoints.convert.config_json import write
from megatron_nemotron3.checkpoints.convert.config_keys import OWN
from megatron_nemotron3.checkpoints.state import read_arguments
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from tests.support.counted_job import digest
from tests.support.generation_folders import Folders, make
from tests.support.hf_folders import write_hf

Capture = pytest.CaptureFixture[str]
SUPER = tiny(get("super"))
#: In no catalog.
OTHER = SUPER.but(name="other", pattern="M*E", mtp_num_layers=3, mtp_loss_scaling_factor=0.25)


@pytest.fixture(scope="module")
def folders_with_text(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return make(tmp_path_factory.mktemp("text"), monkeypatch)


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
    [SUPER, OTHER, OTHER.but(mtp_use_repeated_layer=False), OTHER.but(mtp_num_layers=1)],
    ids=["super", "other", "a block per depth", "one depth"],
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
    write_hf(tmp_path / "super", SUPER)
    write_hf(tmp_path / "other", OTHER)
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
        pattern = f"{(SUPER if name == 'super' else OTHER).pattern}{'/*E' * depths}"
        assert arguments(tmp_path / "out")["hybrid_layer_pattern"] == pattern
        shutil.rmtree(tmp_path / "out")


def test_contradictions(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", OTHER)
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
    opened = open_hugging_face(tmp_path / "hf", model=OTHER)
    assert opened.mtp_source == "--model other; config.json says 7" and opened.config.mtp_num_layers == 3
    with pytest.raises(ValueError, match=r"--mtp-num-layers -1: .* has 1 MTP block"):
        open_hugging_face(tmp_path / "hf", mtp_num_layers=-1)


def test_generate_and_evaluate(folders_with_text: Folders, tmp_path: Path, capsys: Capture) -> None:
    """The loss is measured at every depth; drafts are checked against it."""
    f = folders_with_text
    folder = Path(shutil.copytree(f.hf, tmp_path / "hf"))
    asked = ("--checkpoint", folder, "--tokenizer", f.tokenizer, "--device", "cpu", "--json")
    text = ("--text", tmp_path / "text", "--tokens", 64, "--draft", 0)
    (tmp_path / "text").write_text("line 1: the naïve café\n" * 60, encoding="utf-8")
    for depths in (2, 1):
        found = json.loads(command(capsys, "evaluate", *asked, *text))
        assert found["mtp_num_layers"] == len(found["mtp_loss"]) == depths
        assert ("config.json does not say" in found["mtp_source"]) == (depths == 1)
        words = ("--prompt", "line", "--max-new-tokens", 3, "--draft", 2)
        assert json.loads(command(capsys, "generate", *asked, *words))["mtp_num_layers"] == depths
        if depths == 2:
            without_key(folder)


def test_transformers_ignores_the_key(tmp_path: Path) -> None:
    """It is kept by from_pretrained, and changes no output."""
    transformers = pytest.importorskip("transformers")
    data = write(SUPER.but(pattern="M*E"))
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
