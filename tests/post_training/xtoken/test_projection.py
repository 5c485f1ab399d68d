"""The string rules, the file of the projection, and `nemotron3 distill projection`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_nemotron3 import cli
from megatron_nemotron3.train.teacher.projection import (
    JOINED,
    NONE,
    SAME,
    SPECIAL,
    SPLIT,
    Projection,
    read_for,
    rows,
)
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary
from tests.post_training.xtoken.tokenizers_of import TEXT, train

Capture = pytest.CaptureFixture[str]


def _named(student: ByteVocabulary, teacher: ByteVocabulary, text: bytes, **options: int) -> tuple[str, dict]:
    row = rows(student, teacher, **options)[student.ids[text]]
    return row.rule, {teacher.tokens[i]: weight for i, weight in row.weights}


def test_rules(folders: dict[str, Path]) -> None:
    student, teacher = ByteVocabulary(folders["packs"]), ByteVocabulary(folders["splits"])
    assert _named(student, teacher, b" of") == (SAME, {b" of": 1.0})
    rule, weights = _named(student, teacher, b"201")
    assert rule == SPLIT and list(weights) == [b"2", b"0", b"1"]
    assert list(weights.values()) == pytest.approx([1 / 1.11, 0.1 / 1.11, 0.01 / 1.11])
    assert _named(student, teacher, b"201", pieces=1) == (SPLIT, {b"2": 1.0})
    _, two = _named(student, teacher, b"201", width=2)
    assert list(two.values()) == pytest.approx([1 / 1.1, 0.1 / 1.1])
    # The names of the ends of a text differ, their roles do not; the teacher's pad token has no role here.
    found = rows(student, teacher)
    assert found[student.roles["eos_token"]] == (SPECIAL, ((teacher.roles["eos_token"], 1.0),))
    assert rows(teacher, student)[1].rule == NONE


def test_joined(tmp_path: Path) -> None:
    """What the teacher spells with other tokens than the student's also gives weights to the student's."""
    student = ByteVocabulary(train(tmp_path / "s", 270, texts=["abcabd"] * 8))
    teacher = ByteVocabulary(train(tmp_path / "t", 270, texts=["bcabce"] * 8))
    with_joined, without = rows(student, teacher), rows(student, teacher, joined=False)
    more = [i for i, (a, b) in enumerate(zip(with_joined, without)) if a != b]
    assert more and all(
        without[i].rule in (SPLIT, NONE) and with_joined[i].rule in (SPLIT, JOINED) for i in more
    )
    for row in (*with_joined, *without):
        assert not row.weights or sum(w for _, w in row.weights) == pytest.approx(1)


@pytest.mark.parametrize("name", ["packs", "splits", "sentence"])
def test_tokens_spell_the_text(folders: dict[str, Path], name: str) -> None:
    """Also a text that is cut inside of a character, and one that mentions a special token."""
    vocabulary = ByteVocabulary(folders[name])
    texts = [TEXT[2].encode(), TEXT[2].encode()[:-6], "日本".encode()[1:], b"\xff\xfe", b"<|end|><eos>", b""]
    for text, ids in zip(texts, vocabulary.encode(texts)):
        assert ids is not None and vocabulary.text(ids) == text


def test_file(folders: dict[str, Path], tmp_path: Path) -> None:
    student, teacher = ByteVocabulary(folders["packs"]), ByteVocabulary(folders["splits"])
    path = tmp_path / "projection.safetensors"
    made = Projection.build(student, teacher)
    made.save(path)
    found = read_for(path, student, teacher)
    assert np.array_equal(found.tokens, made.tokens) and np.array_equal(found.weights, made.weights)
    assert found.counts == made.counts and sum(found.counts.values()) == len(student)
    assert set(load_file(path)) == {"tokens", "weights"}
    with pytest.raises(ValueError, match="is for another tokenizer of the student than .* --output FILE"):
        read_for(path, teacher, teacher)
    with pytest.raises(ValueError, match="is for another tokenizer of the teacher"):
        read_for(path, student, student)


def _damaged(path: Path, kind: str) -> None:
    data = path.read_bytes()
    tokens = load_file(path)["tokens"].size
    if kind == "cut":
        data = data[:-4]
    elif kind == "weight":
        data = data[:-4] + np.float32(np.nan).tobytes()
    elif kind == "sum":
        data = data[: -4 * tokens] + np.float32(0.5).tobytes() + data[-4 * tokens + 4 :]
    elif kind == "token":
        data = data[: -8 * tokens] + np.int32(1 << 20).tobytes() + data[-8 * tokens + 4 :]
    elif kind == "format":
        data = data.replace(b"nemotron3-xtoken-1", b"nemotron3-xtoken-9")
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["cut", "weight", "sum", "token", "format"])
def test_a_damaged_file_is_refused(
    folders: dict[str, Path], tmp_path: Path, kind: str, capsys: Capture
) -> None:
    words = ["distill", "projection", str(folders["packs"]), str(folders["splits"])]
    path = tmp_path / "p"
    assert cli.main([*words, "--output", str(path)]) == 0
    _damaged(path, kind)
    assert cli.main([*words, "--projection", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"nemotron3 distill projection: {path}") and len(said.splitlines()) == 1


def test_the_digest_is_of_the_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    """Spaces, the order of keys and settings of use do not count; another merge does."""
    said = json.loads((folders["packs"] / "tokenizer.json").read_text())
    said["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(reversed(said.items())), indent=4))
    digest = ByteVocabulary(folders["packs"]).digest
    assert ByteVocabulary(tmp_path).digest == digest
    said["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    assert ByteVocabulary(tmp_path / "tokenizer.json").digest != digest


def test_tokens_without_bytes_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"bytes of its tokens are not known \(decoder WordPiece\)"):
        ByteVocabulary(tmp_path)


def test_command(folders: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    words = ["distill", "projection", str(folders["packs"]), str(folders["splits"])]
    path = tmp_path / "projection.safetensors"
    assert cli.main([*words, "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "in no pair: use p-kl" in out
    assert cli.main([*words, "--projection", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rules"]["same"] > 256 and found["numerals"] == found["unpaired_numerals"] > 3
    assert found["student"]["digest"] == ByteVocabulary(folders["packs"]).digest


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--width", "0"], "--width 0: give 1 to 64"),
        (["--projection", "x", "--pieces", "2"], "--pieces goes with a new one: drop one of them"),
        (["--output", "none/x"], "mkdir -p"),
    ],
)
def test_bad_input(folders: dict[str, Path], more: list[str], said: str, capsys: Capture) -> None:
    import re

    assert cli.main(["distill", "projection", str(folders["packs"]), str(folders["splits"]), *more]) == 2
    captured = capsys.readouterr()
    assert re.search(said, captured.err) and not captured.out
