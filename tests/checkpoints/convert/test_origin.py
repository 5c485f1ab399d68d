"""What config.json and the other files of a Hugging Face folder say survives Megatron and a training."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import pickles
from megatron_nemotron3.checkpoints.convert import config_json, from_hf
from megatron_nemotron3.checkpoints.convert.checkpoints import open_megatron
from megatron_nemotron3.checkpoints.convert.origin import keep_origin
from megatron_nemotron3.checkpoints.convert.special_tokens import special_ids
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.checkpoints.state import read_arguments
from megatron_nemotron3.common import limits
from megatron_nemotron3.models import get
from megatron_nemotron3.train.data.tokenizer import train_tokenizer
from tests.support.hf_folders import read_hf, write_hf

Capture = pytest.CaptureFixture[str]
CONFIG = get("super-tiny").but(pattern="M*E", hidden_size=64, vocab_size=256, num_moe_experts=8)
#: Keys of a release that Megatron has no place for.
SAID: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "eos_token_id": [2, 11],
    "pad_token_id": 0,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "initializer_range": 0.0133,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "time_step_floor": 1e-4,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "unsloth_version": "2025.11.3",
    "use_cache": True,
}
FILES = {
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b'{"eos_token": "x"}',
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b'{"temperature": 1.0}',
    "configuration_nemotron_h.py": b"# code\n",
}


def release(folder: Path) -> dict[str, Any]:
    """A released folder; returns its config.json."""
    write_hf(folder, CONFIG)
    data = config_json.write(CONFIG) | SAID
    # As released: nothing of ours.
    data = {key: data[key] for key in data if key != "megatron_nemotron3"}
    (folder / "config.json").write_text(json.dumps(data))
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return data


def run(capsys: Capture, *words: object) -> str:
    assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def said(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return result


def trained(base: Path, target: Path, monkeypatch: pytest.MonkeyPatch, **arguments: object) -> Path:
    """Checkpoint of a run that started from `base`: its arguments are a launch's, and it keeps no files."""
    plain = from_hf.common_state

    def as_trained(args: Namespace) -> dict[str, Any]:
        launched = {"seq_length": 128, "max_position_embeddings": 128, "vocab_size": None}
        vars(args).update(launched | arguments)
        return plain(args) | {"iteration": 7}

    with monkeypatch.context() as patch:
        patch.setattr(from_hf, "common_state", as_trained)
        assert cli.main(["convert", "from-hf", str(base), str(target)]) == 0
    shutil.rmtree(target / "release/hugging_face")
    (target / "release").rename(target / "iter_0000007")
    (target / "latest_checkpointed_iteration.txt").write_text("7")
    return target


def test_there_and_back(tmp_path: Path, capsys: Capture) -> None:
    """Every key with its value, and every file to the byte."""
    data = release(tmp_path / "hf")
    run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    out = run(capsys, "convert", "to-hf", tmp_path / "m", tmp_path / "back")
    origin = tmp_path / "m/release/hugging_face"
    assert f"config.json  as in {origin}" in out and f"tokenizer    as in {origin}" in out
    found = said(tmp_path / "back")
    assert data.items() <= found.items() and set(found) - set(data) == {"megatron_nemotron3"}
    assert {name: (tmp_path / "back" / name).read_bytes() for name in FILES} == FILES
    assert open_megatron(tmp_path / "m").config.max_position_embeddings == 262144
    # transformers reads the same.
    transformers = pytest.importorskip("transformers")
    one, other = (transformers.AutoConfig.from_pretrained(tmp_path / name) for name in ("hf", "back"))
    assert {**one.to_dict(), "megatron_nemotron3": other.megatron_nemotron3} == {
        **other.to_dict(),
        "_name_or_path": one.to_dict().get("_name_or_path"),
    }


@pytest.mark.parametrize(("argument", "steps"), [("pretrained_checkpoint", 1), ("load", 2)])
def test_a_run_finds_it_in_what_it_started_from(
    argument: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Also where the run started from another run, and where it then went on from itself."""
    data = release(tmp_path / "hf")
    run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    source = tmp_path / "m"
    for step in range(steps):
        target = tmp_path / f"run{step}"
        given = {argument: str(source), "save": str(target)}
        source = trained(tmp_path / "hf", target, monkeypatch, **given)
    assert not list(source.rglob("config.json"))
    run(capsys, "convert", "to-hf", source, tmp_path / "back")
    found = said(tmp_path / "back")
    assert data.items() <= found.items() and found["max_position_embeddings"] == 262144
    assert {name: (tmp_path / "back" / name).read_bytes() for name in FILES} == FILES
    # The base is gone.
    shutil.rmtree(tmp_path / "m")
    out = run(capsys, "convert", "to-hf", source, tmp_path / "later")
    assert "the model's source is not known: without auto_map" in out
    assert "token ids    none: no tokenizer says them" in out
    assert "eos_token_id" not in said(tmp_path / "later")


def test_a_folder_that_loads_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    release(tmp_path / "hf")
    source = trained(tmp_path / "hf", tmp_path / "run", monkeypatch, load=str(tmp_path / "run"))
    assert "source is not known" in run(capsys, "convert", "to-hf", source, tmp_path / "back")
    # A run that saves next to the release that it was converted to.
    run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    shutil.copytree(tmp_path / "m/release", source / "release")
    run(capsys, "convert", "to-hf", source, tmp_path / "there")
    assert said(tmp_path / "there")["eos_token_id"] == [2, 11]


def test_a_run_of_train_keeps_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    data = release(tmp_path / "hf")
    run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    trained(tmp_path / "hf", tmp_path / "run/checkpoints", monkeypatch)
    keep_origin(tmp_path / "m", tmp_path / "run")
    shutil.rmtree(tmp_path / "m")
    run(capsys, "convert", "to-hf", tmp_path / "run", tmp_path / "back")
    assert data.items() <= said(tmp_path / "back").items()
    assert {name: (tmp_path / "back" / name).read_bytes() for name in FILES} == FILES


def test_what_cannot_be_kept_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A machine that has no process to try a pickle in says nothing about the source: it is no verdict."""
    release(tmp_path / "hf")
    run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(pickles, "_tried", set())
        patch.setattr(pickles, "_is_harmless", lambda data: False)
        patch.setattr(limits, "_fork", lambda: os.open("/nowhere", os.O_RDONLY))
        with pytest.raises(limits.ChildError, match="no process to try a pickle in: No such file"):
            keep_origin(tmp_path / "m", tmp_path / "run")
        with pytest.raises(limits.ChildError):
            open_megatron(tmp_path / "m")
        assert cli.main(["check", str(tmp_path / "m")]) == 2
        assert (
            capsys.readouterr().err
            == "nemotron3 check: no process to try a pickle in: No such file or directory\n"
        )
    (tmp_path / "m/release/metadata.json").unlink()
    keep_origin(tmp_path / "m", tmp_path / "run")
    line = capsys.readouterr().out
    assert line.startswith("not kept     config.json") and "metadata.json: the file is missing" in line
    assert not (tmp_path / "run/hugging_face").exists()


def test_the_length_of_a_released_model_without_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The catalog knows it; the launch had sequences of 128."""
    nano = get("nano-tiny")
    write_hf(tmp_path / "hf", nano)
    source = trained(tmp_path / "hf", tmp_path / "run", monkeypatch)
    run(capsys, "convert", "to-hf", source, tmp_path / "back")
    assert said(tmp_path / "back")["max_position_embeddings"] == nano.max_position_embeddings == 256


def test_the_tokenizer_of_the_run_goes_before_that_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It comes whole: the template in its configuration is not covered by the source's file."""
    release(tmp_path / "hf")
    run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    own = {"tokenizer.json": b'{"b": 2}', "tokenizer_config.json": b'{"chat_template": "own"}'}
    (tmp_path / "chat").mkdir()
    for name, content in own.items():
        (tmp_path / "chat" / name).write_bytes(content)
    given = {"load": str(tmp_path / "m"), "tokenizer_model": str(tmp_path / "chat")}
    source = trained(tmp_path / "hf", tmp_path / "run", monkeypatch, **given)
    out = run(capsys, "convert", "to-hf", source, tmp_path / "back")
    assert f"tokenizer    as in {tmp_path / 'chat'}" in out
    found = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()}
    assert own.items() <= found.items() and "chat_template.jinja" not in found
    assert found["generation_config.json"] == FILES["generation_config.json"]
    assert said(tmp_path / "back")["eos_token_id"] == [2, 11]
    # In the checkpoint itself, as Megatron's main saves it; and a reference before all of them.
    place = source / "iter_0000007/tokenizer"
    place.mkdir()
    (place / "tokenizer.json").write_bytes(b"{}")
    run(capsys, "convert", "to-hf", source, tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_bytes() == b"{}"
    run(capsys, "convert", "to-hf", source, tmp_path / "given", "--reference", tmp_path / "chat")
    assert (tmp_path / "given/tokenizer.json").read_bytes() == own["tokenizer.json"]
    assert said(tmp_path / "given")["eos_token_id"] == [2, 11]


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, capsys: Capture) -> None:
    release(tmp_path / "hf")
    assert "none found" not in run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    assert "none found" not in run(capsys, "convert", "to-hf", tmp_path / "m", tmp_path / "back")
    (tmp_path / "hf/tokenizer.json").unlink()
    out = run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "bare")
    line = f"tokenizer    none found in {tmp_path}/hf: later commands need --tokenizer DIR\n"
    assert out.count("tokenizer  ") == 1 and line in out
    out = run(capsys, "convert", "to-hf", tmp_path / "bare", tmp_path / "lost")
    line = "tokenizer    none found: --reference DIR copies that of DIR\n"
    assert out.count("tokenizer  ") == 1 and line in out


def test_a_reference_is_a_hugging_face_folder_or_a_tokenizers(tmp_path: Path, capsys: Capture) -> None:
    """Any other folder is refused before any work; code is copied only where config.json names it."""
    release(tmp_path / "hf")
    shutil.copytree(tmp_path / "hf", tmp_path / "reference")
    for name in FILES:
        (tmp_path / "hf" / name).unlink()
    run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    (tmp_path / "code").mkdir()
    for name in ("train.py", "LICENSE", "generation_config.json"):
        (tmp_path / "code" / name).write_text("{}")
    words = ["convert", "to-hf", tmp_path / "m", tmp_path / "out", "--reference"]
    assert cli.main([*map(str, words), str(tmp_path / "code")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(
        f"{tmp_path}/code: it has no config.json and no tokenizer: give a Hugging Face folder\n"
    )
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    # A folder of a tokenizer alone, as `finetune` gives.
    (tmp_path / "code/tokenizer.json").write_bytes(FILES["tokenizer.json"])
    run(capsys, *words, tmp_path / "code")
    assert (tmp_path / "out/tokenizer.json").exists() and (tmp_path / "out/LICENSE").exists()
    assert not list((tmp_path / "out").glob("*.py"))
    shutil.rmtree(tmp_path / "out")
    run(capsys, *words, tmp_path / "reference")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == FILES
    shutil.rmtree(tmp_path / "out")
    path = tmp_path / "reference/config.json"
    path.write_text(json.dumps({key: value for key, value in said(path.parent).items() if key != "auto_map"}))
    run(capsys, *words, path.parent)
    assert not list((tmp_path / "out").glob("*.py"))


def test_a_model_without_a_source_gets_the_token_ids_of_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """transformers' generate ends with the end of text then."""
    write_hf(tmp_path / "hf", CONFIG)
    place = tmp_path / "chat"
    train_tokenizer(["some text"], CONFIG.vocab_size + 8, place, special=("<s>",))
    given = json.loads((place / "tokenizer_config.json").read_text())
    given["bos_token"] = {"content": "<s>", "special": True}
    (place / "tokenizer_config.json").write_text(json.dumps(given))
    source = trained(tmp_path / "hf", tmp_path / "run", monkeypatch, tokenizer_model=str(place))
    out = run(capsys, "convert", "to-hf", source, tmp_path / "back")
    ids = {"bos_token_id": 2, "eos_token_id": 0, "pad_token_id": 1}
    assert ids.items() <= said(tmp_path / "back").items()
    assert "source is not known: without auto_map and the like" in out
    assert "token ids    bos_token_id 2, eos_token_id 0, pad_token_id 1, as the tokenizer says" in out
    run(capsys, "check", tmp_path / "back")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert {key: getattr(model.generation_config, key) for key in ids} == ids
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "back")
    assert {key: getattr(settings, key) for key in ids} == ids
    model.generation_config = transformers.GenerationConfig()
    likely = {"max_new_tokens": 4, "sequence_bias": {(0,): 1e30}, "do_sample": False}
    prompt = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2)}
    assert model.generate(**prompt, generation_config=settings, **likely).tolist() == [[5, 6, 0]]
    # What config.json says stays as it is, even if it is less.
    data = {key: value for key, value in said(tmp_path / "back").items() if key not in ids}
    shutil.copytree(place, tmp_path / "reference")
    (tmp_path / "reference/config.json").write_text(json.dumps(data | {"eos_token_id": 7}))
    run(capsys, "convert", "to-hf", source, tmp_path / "more", "--reference", tmp_path / "reference")
    found = said(tmp_path / "more")
    assert found["eos_token_id"] == 7 and "pad_token_id" not in found
    assert json.loads((tmp_path / "more/generation_config.json").read_text()) == {"eos_token_id": 7}


WORDS = {"tokenizer_config.json": b'{"eos_token": "x", "pad_token": {"content": "y"}, "bos_token": null}'}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"tokenizer.json": b'{"model": {"vocab": {"x": 3, "y": 250}}}'}, {"eos": 3}),
        ({"tokenizer.json": b'{"model": {"vocab": [["a", 0.5], ["y", 0], 7, ["x"]]}}'}, {"eos": 3, "pad": 1}),
        (
            {
                "tokenizer.json": b'{"model": {"vocab": {"x": 3}}, "added_tokens": [7, '
                b'{"id": 9, "content": "x"}]}',
                "vocab.json": b'{"x": 1, "y": 2}',
            },
            {"eos": 9, "pad": 2},
        ),
        ({"tokenizer.json": b'{"model": 3, "added_tokens": {"x": 2}}'}, {}),
        (
            {"tokenizer.json": b'{"added_tokens": [{"id": true, "content": "x"}, {"id": -1}]}'},
            {},
        ),
        ({"tokenizer.json": b"[" * 100000, "added_tokens.json": b'{"x": "3", "y": 4}'}, {"pad": 4}),
        ({"tokenizer_config.json": b"no"}, {}),
        (
            {
                "special_tokens_map.json": b'{"eos_token": "z"}',
                "tokenizer_config.json": b'{"added_tokens_decoder": {"5": {"content": "z"}, "a": {}}}',
            },
            {"eos": 5},
        ),
    ],
)
def test_token_ids_of_tokenizers(files: dict[str, bytes], ids: dict[str, int]) -> None:
    assert special_ids(WORDS | files, 100) == {f"{name}_token_id": number for name, number in ids.items()}


def test_a_source_of_another_model_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    release(tmp_path / "other")
    run(capsys, "convert", "from-hf", tmp_path / "other", tmp_path / "m")
    pruned = CONFIG.but(moe_ffn_hidden_size=32)
    write_hf(tmp_path / "hf", pruned)
    source = trained(tmp_path / "hf", tmp_path / "run", monkeypatch, load=str(tmp_path / "m"))
    out = run(capsys, "convert", "to-hf", source, tmp_path / "back")
    origin = tmp_path / "m/release/hugging_face/config.json"
    assert f"config.json  {origin} is not used: " in out and "moe_ffn_hidden_size=96 (expected 32)" in out
    assert "eos_token_id" not in said(tmp_path / "back")


def test_without_mtp_and_with_more_tokens(tmp_path: Path, capsys: Capture) -> None:
    """What the source says of its MTP and its vocabulary is not what is written."""
    release(tmp_path / "hf")
    run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m", "--mtp-num-layers", 0)
    run(capsys, "convert", "to-hf", tmp_path / "m", tmp_path / "back")
    found = said(tmp_path / "back")
    assert found["eos_token_id"] == [2, 11] and not [key for key in found if "mtp" in key or "nextn" in key]
    assert not [name for name in read_hf(tmp_path / "back") if name.startswith("mtp.")]
    run(capsys, "check", tmp_path / "back")
    words = (tmp_path / "m", tmp_path / "fewer", "--vocab-size", 250)
    run(capsys, "convert", "to-hf", *words)
    found = said(tmp_path / "fewer")
    assert found["vocab_size"] == 250 and found["eos_token_id"] == [2, 11]
    assert read_hf(tmp_path / "fewer")["lm_head.weight"].shape[0] == 250


def test_a_file_that_is_a_link_to_elsewhere(tmp_path: Path) -> None:
    """Not even its arguments are read: the folder could have them of another model."""
    folder = tmp_path / "megatron"
    write_hf(tmp_path / "hf", get("super-tiny"))
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(folder), "--workers", "1"]) == 0
    assert read_arguments(folder / "release")
    data = next((folder / "release").glob("*.distcp"))
    data.rename(tmp_path / data.name)
    data.symlink_to(tmp_path / data.name)
    with pytest.raises(CheckpointError, match="it is a link to .*, outside of"):
        read_arguments(folder / "release")
