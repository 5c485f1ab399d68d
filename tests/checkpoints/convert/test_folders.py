"""Every command that reads takes a run, its checkpoints, one of them, or a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert.checkpoints import (
    open_checkpoint,
    open_hugging_face,
    open_megatron,
)
from megatron_nemotron3.checkpoints.convert.config_keys import OWN
from megatron_nemotron3.checkpoints.folders import locate, locate_one
from megatron_nemotron3.models import get, identify, names, tiny
from tests.support.generation_folders import Folders, make
from tests.support.hf_folders import write_hf
from tests.train.monitor.test_watch import every_kind, write

Capture = pytest.CaptureFixture[str]
FORMS = ("run", "checkpoints", "release", "iter", "hf")
QUICK = ("run", "hf")


@pytest.fixture(scope="module")
def folders_with_text(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return make(tmp_path_factory.mktemp("text"), monkeypatch)


@pytest.fixture(scope="module")
def forms(folders_with_text: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every form of a checkpoint. The names of the folders say nothing of what is in them."""
    made = tmp_path_factory.mktemp("forms")
    run = Path(shutil.copytree(folders_with_text.run, made / "ultra"))
    shutil.copytree(run / "checkpoints/release", run / "checkpoints/iter_0000300")
    write(run / "tensorboard", every_kind(2, 3))
    hf = Path(shutil.copytree(folders_with_text.hf, made / "nano"))
    return {
        "run": run,
        "checkpoints": run / "checkpoints",
        "release": run / "checkpoints/release",
        "iter": run / "checkpoints/iter_0000300",
        "hf": hf,
    }


def command(capsys: Capture, *words: object) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, out, err


@pytest.mark.parametrize(
    "form", [one if one in QUICK else pytest.param(one, marks=pytest.mark.full) for one in FORMS]
)
def test_every_reading_command(
    forms: dict[str, Path], folders_with_text: Folders, form: str, tmp_path: Path, capsys: Capture
) -> None:
    folder, model = forms[form], "custom"
    for full in ([], ["--full"]):
        status, out, _ = command(capsys, "check", folder, *full)
        assert status == 0 and out.endswith("sound\n")
    one = ["--workers", 1]
    for sides in ((folder, forms["release"]), (forms["release"], folder)):
        status, out, _ = command(capsys, "convert", "verify", *sides, *one)
        assert status == 0 and out.count(f": {model}, layers M*E") == 2
    asked = [folder, "--tokenizer", folders_with_text.tokenizer, "--device", "cpu"]
    status, out, _ = command(
        capsys, "generate", *asked, "--prompt", "line 7", "--max-new-tokens", 2, "--json"
    )
    assert status == 0 and json.loads(out)["model"] == model
    text = ["--data-path", next(forms["run"].glob("data/*/corpus.idx")).with_suffix("")]
    status, out, _ = command(capsys, "evaluate", *asked, *text, "--tokens", 64, "--draft", 0, "--json")
    assert status == 0 and json.loads(out)["model"] == model
    way, other = ("from-hf", "to-hf") if form == "hf" else ("to-hf", "from-hf")
    assert command(capsys, "convert", way, folder, tmp_path / "out", *one)[0] == 0
    status, _, err = command(capsys, "convert", other, folder, tmp_path / "no", *one)
    assert status == 2 and f"use `nemotron3 convert {way}`" in err and not (tmp_path / "no").exists()
    status, out, err = command(capsys, "report", "monitors", folder, "--output", tmp_path / "monitor.png")
    if form == "hf":
        assert status == 2 and "no TensorBoard event files" in err
    else:
        assert status == 0 and "series of up to 2 layers" in out


def test_depths_of_mtp(folders_with_text: Folders, tmp_path: Path, capsys: Capture) -> None:
    """The loss is measured at every depth that config.json says; drafts are checked against it."""
    f = folders_with_text
    folder = Path(shutil.copytree(f.hf, tmp_path / "hf"))
    asked = (folder, "--tokenizer", f.tokenizer, "--device", "cpu", "--json")
    text = ("--text", tmp_path / "text", "--tokens", 64, "--draft", 0)
    (tmp_path / "text").write_text("line 1: the naïve café\n" * 60, encoding="utf-8")
    for depths in (2, 1):
        found = json.loads(command(capsys, "evaluate", *asked, *text)[1])
        assert found["mtp_num_layers"] == len(found["mtp_loss"]) == depths
        assert ("config.json does not say" in found["mtp_source"]) == (depths == 1)
        words = ("--prompt", "line", "--max-new-tokens", 3, "--draft", 2)
        assert json.loads(command(capsys, "generate", *asked, *words)[1])["mtp_num_layers"] == depths
        data = json.loads((folder / "config.json").read_text())
        data.pop(OWN, None)  # as a release
        (folder / "config.json").write_text(json.dumps(data))


def test_one_resolver(forms: dict[str, Path]) -> None:
    run = forms["run"]
    assert {form: locate(folder).kind for form, folder in forms.items()} == {
        **{"run": "checkpoints", "checkpoints": "checkpoints", "hf": "hugging face"},
        **{"release": "checkpoint", "iter": "checkpoint"},
    }
    assert {locate(forms[form]).run for form in FORMS[:4]} == {run}
    assert locate_one(run).folder == forms["release"] and locate_one(forms["iter"]).folder == forms["iter"]
    assert locate_one(run, 300).folder == forms["iter"]
    with pytest.raises(ValueError, match="it is a single checkpoint: leave out --iteration"):
        locate_one(forms["iter"], 300)
    with pytest.raises(ValueError, match="no iteration 200; there are: 300"):
        locate_one(run, 200)


def test_what_could_be_read_in_two_ways_is_refused(forms: dict[str, Path], tmp_path: Path) -> None:
    """config.json alone makes no checkpoint of a Megatron folder."""
    for form in ("run", "checkpoints", "iter"):
        both = Path(shutil.copytree(forms[form], tmp_path / form))
        shutil.copy(forms["hf"] / "config.json", both)
        assert locate(both).kind == locate(forms[form]).kind
        shutil.copy(forms["hf"] / "model.safetensors", both)
        with pytest.raises(
            ValueError, match=r"it holds .*Hugging Face checkpoint \(model.saf.* and a run|and a Hugging"
        ):
            locate(both)
    export = Path(shutil.copytree(forms["hf"], tmp_path / "hf/iter_0000007"))
    assert locate(export).kind == "hugging face"
    twice = Path(shutil.copytree(forms["checkpoints"], tmp_path / "twice"))
    shutil.copytree(forms["checkpoints"], twice / "checkpoints")
    with pytest.raises(ValueError, match="it holds Megatron's checkpoints .iter_0000300. and a run"):
        locate(twice)


def test_where_there_is_none(forms: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint in it.*; below it are .*nano, .*ultra"):
        locate(forms["run"].parent)
    (tmp_path / "demo/checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoints: no checkpoint has been saved there yet"):
        locate(tmp_path / "demo")
    (tmp_path / "file").touch()
    for name, message in (("file", "it is not a folder"), ("none", "it does not exist")):
        with pytest.raises(ValueError, match=message):
            locate(tmp_path / name)


@pytest.mark.parametrize("name", names())
def test_models_are_identified(name: str) -> None:
    """Whatever the folder is called, the vocabulary is, or how often MTP was applied."""
    config = get(name)
    for form in (config, tiny(config)):
        found = identify(form.but(name="x", vocab_size=320, seq_length=64, max_position_embeddings=64))
        assert form in found and (len(found) == 1 or form is not config)
        if form.has_mtp and name != "lightning":  # without MTP, that is Nano
            assert identify(form.but(mtp_pattern=None, mtp_num_layers=0)) == found
        assert identify(form.but(hidden_size=form.hidden_size + 8)) == ()


def test_models_are_called_by_their_name(tmp_path: Path, capsys: Capture) -> None:
    write_hf(tmp_path / "llama", tiny(get("lightning")))
    assert cli.main(["convert", "from-hf", str(tmp_path / "llama"), str(tmp_path / "x"), "--workers=1"]) == 0
    assert cli.main(["convert", "verify", str(tmp_path / "x"), str(tmp_path / "llama"), "--workers=1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ", layers " in line]
    assert len(lines) == 3 and all("lightning-tiny" in line.partition("): ")[2] for line in lines)


def test_options_of_the_other_kind(forms: dict[str, Path]) -> None:
    """An option that the named kind lacks is an error; one that neither kind has always is."""
    with pytest.raises(TypeError, match="dequantize"):
        open_megatron(forms["run"], dequantize=True)
    with pytest.raises(TypeError, match="from_masters"):
        open_hugging_face(forms["hf"], from_masters=True)
    for form in ("run", "hf"):
        with pytest.raises(TypeError, match="dequantise"):
            open_checkpoint(forms[form], dequantise=True)
    assert open_checkpoint(forms["hf"], iteration=None, from_masters=True).kind == "hugging face"


def test_a_model_of_ones_own_is_called_as_its_run_says(forms: dict[str, Path], tmp_path: Path) -> None:
    """A manifest that names another model of the catalog is not believed."""
    run = Path(shutil.copytree(forms["run"], tmp_path / "run"))
    for stated, found in (("mine", "mine"), ("a b\n", "custom"), (7, "custom")):
        (run / "run.json").write_text(json.dumps({"parts": {"model": {"name": stated}}}))
        assert open_checkpoint(run).config.name == found
    write_hf(tmp_path / "hf", tiny(get("super")))
    words = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "save"), "--workers=1"]
    assert cli.main(words) == 0
    for stated, found in (("ultra-tiny", "ultra-tiny"), ("nano", "super-tiny or ultra-tiny")):
        (tmp_path / "save/run.json").write_text(json.dumps({"parts": {"model": {"name": stated}}}))
        assert open_checkpoint(tmp_path / "save").config.name == found
