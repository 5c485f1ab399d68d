"""The command lines of distillation: what they mean, and what ends them before anything starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.common.switches import BOOST, DISTILL
from megatron_nemotron3.launch import boosting
from megatron_nemotron3.launch.script_folders import update_manifest
from megatron_nemotron3.train.teacher import check, settings
from megatron_nemotron3.train.teacher.settings import Distillation, LogitsManifest, part_path, read_manifest
from megatron_nemotron3.train.teacher.vocabulary import Vocabulary, of_tokenizer
from tests.train.data.test_conversations import write_tokenizer

Capture = pytest.CaptureFixture[str]

SCRIPT = str(Path(settings.__file__).parents[1] / "pretrain_script.py")


def test_text_and_back() -> None:
    how = Distillation("runs/a, teacher=b", "js", 2.5, 0.25)
    assert settings.parse(settings.text_of((how,))) == (how,)
    across = settings.parse("temperature=2,projection=/a/p,teacher=runs/big")
    assert across == (Distillation("runs/big", "p-kl", 2.0, 1.0, "/a/p"),)
    several = (replace(how, weight=0.5), replace(across[0], weight=0.25))
    assert settings.parse(settings.text_of(several)) == several
    assert settings.parse("teacher=runs/big") == (Distillation("runs/big"),)
    assert settings.parse("") == ()


def test_several_teachers() -> None:
    """Weights are equal shares if none is given; the rest of 1 is cross-entropy's."""
    one, two, three = settings.read(["a", "b", "c"], ["kind=js"])
    assert (one, two) == (Distillation("a", "js", weight=1 / 3), Distillation("b", "js", weight=1 / 3))
    assert settings.rest_of((one, two, three)) == 0
    taught = settings.read(["a", "b"], ["weight=0.25", "weight=0.5,projection=/p"])
    assert taught == (Distillation("a", weight=0.25), Distillation("b", "p-kl", 1.0, 0.5, "/p"))
    assert settings.rest_of(taught) == 0.25
    with pytest.raises(ValueError, match=r"weights of the teachers 0.7 \+ 0.7 are above 1"):
        settings.read(["a", "b"], ["weight=0.7"])
    with pytest.raises(ValueError, match="--nemotron3-distill is given 2 times for 3 teachers"):
        settings.read(["a", "b", "c"], ["", ""])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind=l2,teacher=x", "kind=l2: use one of kl"),
        ("kind=p-kl,teacher=x", "kind=p-kl: use one of kl, .*; those with projection=FILE are p-kl, h-kl"),
        ("temperature=0,teacher=x", "temperature=0: give a positive number"),
        ("weight=1.5,teacher=x", "weight=1.5: give a number above 0, up to 1"),
        ("dp=2,teacher=x", "'dp=2': use kind="),
        ("weight=1", "end with teacher=FOLDER"),
    ],
)
def test_wrong_text(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings.parse(text)


def test_the_script_does_not_see_the_options() -> None:
    from megatron_nemotron3.run import split_arguments

    words = split_arguments(
        [
            "--nemotron3-teacher",
            "a",
            "x.py",
            "--lr",
            "1",
            "--nemotron3-distill=kind=js",
            "--nemotron3-teacher",
            "b",
        ]
    )
    assert (words.arguments, words.teachers) == (["--lr", "1"], (("a", "b"), ("kind=js",)))


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (Vocabulary(100), Vocabulary(100), None),
        (Vocabulary(100), Vocabulary(101), "100 and 101 tokens"),
        (Vocabulary(None, 256, 128), Vocabulary(200), None),
        (Vocabulary(None, 256, 128), Vocabulary(100), "129 to 256 and 100 tokens"),
        (Vocabulary(100, digest="a"), Vocabulary(100, digest="b"), "differ in tokens or ids"),
        (Vocabulary(100, digest="a"), Vocabulary(100, digest="a"), None),
    ],
)
def test_vocabularies(one: Vocabulary, other: Vocabulary, said: str | None) -> None:
    found = one.differs(other)
    assert (found is None) if said is None else (found is not None and said in found)


def _run(*words: str) -> int:
    try:
        return cli.main(["run", "--device", "cpu", SCRIPT, *words])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    folder, tokenizer = tmp_path / "logits", write_tokenizer(tmp_path / "tokenizer")
    vocabulary = of_tokenizer(Path(tokenizer))
    assert vocabulary is not None and vocabulary.digest
    manifest = LogitsManifest(4, 0, 2.0, 64, 8, 8, "big", vocabulary, {})
    manifest.write(folder)
    part_path(folder, manifest.parts()[0]).touch()
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nemotron3-teacher", "/nowhere"], "/nowhere: it does not exist"),
        (["--nemotron3-distill", "kind=js"], "--nemotron3-distill goes with --nemotron3-teacher"),
        (["--nemotron3-teacher", "LOGITS", "--vocab-size", "17"], "have different vocabularies"),
        (["--nemotron3-teacher", "LOGITS"], "temperature=1: LOGITS was stored at 2"),
        (
            ["--nemotron3-teacher", "LOGITS", "--nemotron3-distill", "temperature=2", "--seq-length", "32"],
            "--seq-length 32: LOGITS has rows of 64 tokens",
        ),
        (
            ["--nemotron3-teacher", "LOGITS", "--nemotron3-distill", "temperature=2"]
            + ["--train-iters", "3", "--global-batch-size", "4"],
            "reads 12 rows, and LOGITS has 8: train on fewer samples, or store them in a new folder",
        ),
        (["--nemotron3-teacher", "LOGITS", "--use-megatron-fsdp"], "--use-megatron-fsdp does not go with"),
    ],
)
def test_wrong_lines_of_run(words: list[str], said: str, stored: Path, capsys: Capture) -> None:
    assert _run(*(str(stored) if word == "LOGITS" else word for word in words)) == 2
    found = capsys.readouterr().err
    assert said.replace("LOGITS", str(stored)) in found and found.count("\n") == 1


def test_a_folder_of_another_tokenizer(stored: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other"
    other.mkdir()
    data = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    vocabulary, special = data["model"]["vocab"], {token["content"] for token in data["added_tokens"]}
    first, second, *_ = (token for token in vocabulary if token not in special)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(data))
    assert _run("--nemotron3-teacher", str(stored), "--tokenizer-model", str(other)) == 2
    assert "their tokenizers differ in tokens or ids" in capsys.readouterr().err


def test_a_run_goes_on_with_its_teacher_only(stored: Path, tmp_path: Path, capsys: Capture) -> None:
    """The script is never started: the folder of --save is compared before."""
    part_path(stored, read_manifest(stored).parts()[0]).write_bytes(b"log-probabilities")
    other, save = tmp_path / "other-logits", tmp_path / "save"
    shutil.copytree(stored, other)
    moved = tmp_path / "moved"
    shutil.copytree(stored, moved)
    part_path(other, read_manifest(other).parts()[0]).write_bytes(b"others")
    save.mkdir()
    how = Distillation(str(stored), temperature=2.0)
    update_manifest(save, [], teacher=check.record_of((how,)))
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    before = (save / "run.json").read_bytes()

    def run(*words: str) -> tuple[int, str]:
        return _run("--save", str(save), *words), capsys.readouterr().err

    two = ("--nemotron3-distill", "temperature=2")
    for words, said in (
        ((), f"to step 2 with teacher {stored}, not none (logits "),
        (("--nemotron3-teacher", str(other), *two), f"with teacher {stored}, not {other} (logits "),
        (
            ("--nemotron3-teacher", str(stored), "--nemotron3-distill", "temperature=2,weight=0.5"),
            "with another distillation (weight 1.0 -> 0.5): give --change teacher",
        ),
    ):
        status, found = run(*words)
        assert status == 2 and said in found and found.count("\n") == 1
        assert (save / "run.json").read_bytes() == before
    update_manifest(save, [], teacher=check.record_of((replace(how, teacher=str(moved)),)))
    lines = update_manifest(
        save, [], ["teacher"], teacher=check.record_of((replace(how, teacher=str(other)),))
    )
    assert len(lines) == 1 and lines[0].startswith("teacher changes at step 2: logits ")


def test_a_damaged_manifest(stored: Path) -> None:
    (stored / "manifest.json").write_text('{"format": "nemotron3-logits 1", "k": 0}')
    with pytest.raises(ValueError, match="not a manifest"):
        read_manifest(stored)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--teacher", "x", "--distill", "temprature=2"],
            "weight=; did you mean 'temperature'?",
        ),
        (["--teacher", "BOOST"], "NEMOTRON3_BOOST: MTP's heads are trained on what the model"),
    ],
)
def test_wrong_lines_of_train(
    words: list[str],
    said: str,
    stored: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "run"
    if "BOOST" in words:
        monkeypatch.setenv(BOOST, "1")
        words = ["--teacher", str(stored), "--distill", "temperature=2", "--text", SCRIPT]
    assert cli.main(["train", "nano", "--tiny", "--device", "cpu", "--output", str(output), *words]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1 and not output.exists()


def test_no_boost_from_a_teacher(stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Neither a script, nor `nemotron3 train boost`, whose check sees the environment before any work."""
    monkeypatch.setenv(BOOST, "1")
    given = ("--nemotron3-teacher", str(stored), "--nemotron3-distill", "temperature=2")
    assert _run(*given) == 2
    assert "MTP's heads are trained on what the model itself predicts" in capsys.readouterr().err
    with pytest.raises(ValueError, match="NEMOTRON3_DISTILL is set, too, but MTP's heads"):
        boosting.require_trainable([], {DISTILL: "teacher=x"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--samples", "0"], "--samples 0: give 1 or more"),
        (["--samples", "8"], "/nowhere: it does not exist"),
    ],
)
def test_wrong_lines_of_logits(words: list[str], said: str, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "logits"
    assert cli.main(["distill", "logits", "/nowhere", "--output", str(output), *words]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1 and not output.exists()
