"""run.json: a folder's run, and what may change in it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_nemotron3.checkpoints.convert.megatron_args import args_of
from megatron_nemotron3.common.switches import EMULATE, SFT_MEAN
from megatron_nemotron3.launch import (
    Launch,
    ParallelLayout,
    TrainingData,
    data_sets,
    flags,
    manifest,
    to_argv,
)
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.precision import yaml_file

ALL = ("model", *manifest.CHANGES)


def _parts(name: str = "super", *, layout: ParallelLayout | None = None, **given: object) -> manifest.Parts:
    config = tiny(get(name))
    launch = Launch.of(config, layout or ParallelLayout(), **given)  # type: ignore[arg-type]
    environment = {EMULATE: launch.emulate.text()} if launch.emulate else {}
    return manifest.parts_of(to_argv(flags(launch)), environment, config.name)


def _published(name: str) -> manifest.Parts:
    return manifest.parts_of(to_argv(flags(Launch(config=get(name)))), {}, name)


def _written(folder: Path, parts: manifest.Parts) -> manifest.RunManifest:
    manifest.RunManifest(folder).write(parts, None)
    return manifest.RunManifest(folder)


def _emulated(tmp_path: Path) -> manifest.Parts:
    path = tmp_path / "precision.yaml"
    yaml_file.write_precision_file(tiny(get("super")), path)
    return _parts(precision="nvfp4", emulate=True, backend="torch", te_precision_config_file=str(path))


def test_emulated_nvfp4_does_not_become_bf16_in_silence(tmp_path: Path) -> None:
    found = _written(tmp_path, _emulated(tmp_path))
    with pytest.raises(
        ValueError, match=r"to step 7 with nvfp4 emulated, not bf16 \(.*give --change precision"
    ):
        found.require_same(_parts(), 7, (), ALL, {})
    found.require_same(_parts(), 7, ("precision",), ALL, {})
    found.require_same(_emulated(tmp_path), 7, (), ALL, {})
    (line,) = found.write(_parts(), 7)
    assert line.startswith("precision changes at step 7: ")
    (change,) = [c for c in manifest.RunManifest(tmp_path).content["changes"] if c["part"] == "precision"]
    assert change["step"] == 7 and change["values"][EMULATE][1] is None
    with pytest.raises(ValueError, match="to step 9 with bf16, not nvfp4 emulated"):
        manifest.RunManifest(tmp_path).require_same(_emulated(tmp_path), 9, (), ALL, {})


def test_one_switch_of_the_recipe(tmp_path: Path) -> None:
    """The same formats and the same path, but another content or another variable."""
    before = _emulated(tmp_path)
    found = _written(tmp_path, before)
    with (tmp_path / "precision.yaml").open("a") as file:
        file.write("# changed\n")
    after = _parts(
        precision="nvfp4",
        emulate=True,
        backend="torch",
        te_precision_config_file=str(tmp_path / "precision.yaml"),
    )
    with pytest.raises(ValueError, match=r"another precision \(te-precision-config-file sha256"):
        found.require_same(after, 7, (), ALL, {})
    words = ["--fp4-format", "e2m1"]
    found = _written(tmp_path, manifest.parts_of(words, {}))
    with pytest.raises(ValueError, match="NVTE_NVFP4_DISABLE_RHT not given -> 1"):
        found.require_same(manifest.parts_of(words, {"NVTE_NVFP4_DISABLE_RHT": "1"}), 7, (), ALL, {})


def test_margins_of_multiprocessors_are_no_part_of_the_precision(tmp_path: Path) -> None:
    """They do not change numbers, and another GPU needs others."""
    words = ["--fp4-format", "e2m1"]
    margins = {"NVTE_FWD_LAYERNORM_SM_MARGIN": "16", "NVTE_BWD_LAYERNORM_SM_MARGIN": "16"}
    found = _written(tmp_path, manifest.parts_of(words, margins))
    for environment in ({}, margins | {"NVTE_FWD_LAYERNORM_SM_MARGIN": "20"}):
        found.require_same(manifest.parts_of(words, environment), 7, (), ALL, {})
        assert found.write(manifest.parts_of(words, environment), 7) == []


@pytest.mark.parametrize("other", ["nano", "puzzle"])
def test_no_option_allows_another_model(other: str, tmp_path: Path) -> None:
    found = _written(tmp_path, _published("super"))
    with pytest.raises(ValueError, match=f"holds a training of super, not of {other} .*another --output"):
        found.require_same(_published(other), 3, manifest.CHANGES, ALL, {})


def test_a_layout_is_not_another_model(tmp_path: Path) -> None:
    found = _written(tmp_path, _parts())
    layout = ParallelLayout(tp=2, pp=2, ep=2, dp=2)
    found.require_same(_parts(layout=layout), 3, (), ALL, {})
    assert found.write(_parts(layout=layout), 3) == []  # recorded, but nothing to be said
    changes = {change["part"] for change in manifest.RunManifest(tmp_path).content["changes"]}
    assert changes == {"launch"}


def test_mtp_tokenizer_and_data(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1" * 10)
    (tmp_path / "a.idx").write_bytes(b"1" * 4)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    data = {"data_path": (str(tmp_path / "a"),), "split": "99,1,0", "tokenizer_type": "HuggingFaceTokenizer"}

    def parts() -> manifest.Parts:
        return _parts(data=TrainingData(**data, tokenizer_model=str(folder)))  # type: ignore[arg-type]

    found = _written(tmp_path, parts())
    found.require_same(parts(), 3, (), ALL, {})
    (folder / "tokenizer.json").write_text("{ }")
    with pytest.raises(ValueError, match=r"another tokenizer .*--change tokenizer"):
        found.require_same(parts(), 3, (), ALL, {})
    (tmp_path / "a.bin").write_bytes(b"1" * 12)
    both = r"another tokenizer and data set \(.*; data-path a\(10\+4 bytes\) -> a\(12\+4"
    with pytest.raises(ValueError, match=both):
        found.require_same(parts(), 3, (), ALL, {})
    with pytest.raises(
        ValueError, match=r"another data set \(data-path a\(10\+4 bytes\) -> a\(12\+4 bytes\)"
    ):
        found.require_same(parts(), 3, ("tokenizer",), ALL, {})
    without = _parts(extra=("--mtp-loss-scaling-factor", "0.9"))
    with pytest.raises(ValueError, match="another MTP .*--change mtp"):
        found.require_same(without, 3, ("tokenizer", "data"), ALL, {})


def test_a_folder_of_an_older_version(tmp_path: Path) -> None:
    """It has no run.json, but its checkpoint has arguments."""
    config = tiny(get("super"))
    stored: Namespace = args_of(config, padded_vocab_size=config.vocab_size)
    before = manifest.parts_of_checkpoint(vars(stored) | {"bf16": True})
    found = manifest.RunManifest(tmp_path)
    found.require_same(_parts(), 3, (), ALL, before)
    with pytest.raises(ValueError, match=r"holds a training of another model, not of nano-tiny \("):
        found.require_same(_parts("nano"), 3, (), ALL, before)
    without = manifest.parts_of_checkpoint(vars(stored) | {"hybrid_layer_pattern": config.pattern})
    with pytest.raises(ValueError, match=r"another MTP \(hybrid-layer-pattern none -> "):
        found.require_same(_parts(), 3, (), ALL, without | {"precision": before["precision"]})
    with pytest.raises(ValueError, match=r"with bf16, not fp32"):
        found.require_same(_parts(precision="fp32"), 3, (), ALL, before)
    (line,) = found.write(_parts(), 3)
    assert "the folder had none" in line and "before step 3" in line
    assert manifest.RunManifest(tmp_path).write(_parts(), 4) == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"parts": 1, "changes": []}', '{"parts": {}}', "[" * 99_999]
)
def test_a_damaged_file(text: str, tmp_path: Path) -> None:
    (tmp_path / manifest.NAME).write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: it is damaged: remove it"):
        manifest.RunManifest(tmp_path)


def _of_file(path: Path, tokenizer: Path, *words: str, mean: str = "tokens") -> manifest.Parts:
    given = ["--data-path", str(path), "--tokenizer-model", str(tokenizer), *words]
    return manifest.parts_of(given, {SFT_MEAN: mean})


@pytest.mark.parametrize(
    ("rows", "template", "words", "mean", "refused"),
    [
        ("ab", "x", (), "tokens", ""),
        ("ba", "x", (), "tokens", r"another data set \(content of --data-path [0-9a-f]{12}:rows -> "),
        ("ab", "y", (), "tokens", r"another tokenizer \(content of chat template and settings sha256"),
        ("ab", "x", ("--seed", "7"), "tokens", r"another order of its data \(seed 1234 -> 7\)"),
        ("ab", "x", ("--seed", "1234"), "tokens", ""),
        ("ab", "x", (), "conversations", r"data set \(NEMOTRON3_SFT_MEAN not given -> conversations\)"),
    ],
)
def test_what_keeps_its_name_and_size(
    rows: str, template: str, words: tuple[str, ...], mean: str, refused: str, tmp_path: Path
) -> None:
    folder, file = tmp_path / "tokenizer", tmp_path / "rows"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"transformers_version": "4", "bos_token": "a"}')
    (folder / "chat_template.jinja").write_text("x")
    file.write_text("ab")
    found = _written(tmp_path, _of_file(file, folder))
    file.write_text(rows)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "a", "transformers_version": "5"}')
    (folder / "chat_template.jinja").write_text(template)
    new = _of_file(file, folder, *words, mean=mean)
    if refused:
        with pytest.raises(ValueError, match=f"{refused}.*: give --change"):
            found.require_same(new, 3, (), ALL, {})
        (line,) = manifest.RunManifest(tmp_path).write(new, 3)
        assert " changes at step 3: " in line
    else:
        found.require_same(new, 3, (), ALL, {})
        assert manifest.RunManifest(tmp_path).write(new, 3) == []


def test_rows_by_another_path_and_a_record_without_content(tmp_path: Path) -> None:
    file, other = tmp_path / "rows", tmp_path / "more" / "rows"
    other.parent.mkdir()
    for path in (file, other):
        path.write_text("ab")
    parts, moved = _of_file(file, tmp_path, "--seed", "7"), _of_file(other, tmp_path, "--seed", "7")
    _written(tmp_path, parts).require_same(moved, 3, (), ALL, {})
    # As older versions wrote it.
    parts["data"] = {"--data-path": str(file)}
    parts["tokenizer"] = {name: value for name, value in parts["tokenizer"].items() if name[:2] == "--"}
    parts["launch"]["--seed"] = "7"
    file.write_text("ba")
    older = _written(tmp_path, parts)
    older.require_same(_of_file(file, tmp_path, "--seed", "7"), 3, (), ALL, {})
    with pytest.raises(ValueError, match=r"\(seed 7 -> 1234\)"):
        older.require_same(_of_file(file, tmp_path), 3, (), ALL, {})


def test_what_a_run_may_change_is_said(tmp_path: Path) -> None:
    """Megatron goes on with either in silence; the layout has no part in what is learned."""
    found = _written(tmp_path, manifest.parts_of(["--seq-length", "64", "--tp", "2"], {}))
    (line,) = found.write(manifest.parts_of(["--seq-length", "128", "--tp", "1", "--clip-grad", "2"], {}), 3)
    assert line == "other options change at step 3: seq-length 64 -> 128, clip-grad not given -> 2"


def test_a_large_file_is_known_by_places_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sets, "_READ", 4)
    path, found = tmp_path / "large", set()
    for changed in (None, 0, 491, 999, 500):  # between two places the last
        data = bytearray(1000)
        if changed is not None:
            data[changed] = 1
        path.write_bytes(data)
        found.add(data_sets.digest_of(str(path)))
    assert len(found) == 4
