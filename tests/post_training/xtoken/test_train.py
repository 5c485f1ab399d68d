"""A student learns from a teacher with another tokenizer, by the commands of a user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_nemotron3.train import log
from tests.post_training.distill.test_commands import interrupted, nemotron3

#: The same words; numerals of one digit, of three, and of two, which are tokens of the student's only.
FIRST = {"teacher": 0, "other": 100, "student": 10}


def _text(first: int) -> str:
    """Rows of a .jsonl file with numerals from `first` on."""
    words = "{} apples and {} pears or {} plums,"
    places = [(i, j) for i in range(90) for j in range(90)]
    numerals = [[first + (i * j + k) % (first * 9 or 10) for k in (0, i, j)] for i, j in places]
    rows = (" ".join(words.format(*three) for three in numerals[i : i + 40]) for i in range(0, 8100, 40))
    return "".join(f'{{"text": "{row}"}}\n' for row in rows)


def _write_texts(folder: Path) -> None:
    for name, first in FIRST.items():
        (folder / f"{name}.jsonl").write_text(_text(first))


def _train(output: Path, *words: str, steps: int = 40, code: int = 0) -> str:
    return nemotron3(*_words(output, steps), *words, code=code)


def _words(output: Path, steps: int) -> list[str]:
    given = ["--tiny", "--device", "cpu", "--seq-length", "64", "--steps", str(steps), "--lr", "4e-3"]
    return ["train", "nano", *given, "--output", str(output)]


@pytest.mark.full  # tests/post_training/distill/test_signal.py has a step without a run
def test_train(tmp_path: Path) -> None:
    """Without a projection it is refused, with the cure; following that, the divergence falls."""
    _write_texts(tmp_path)
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    _train(teacher, "--text", str(tmp_path / "teacher.jsonl"))
    own = ["--text", str(tmp_path / "student.jsonl"), "--teacher", str(teacher)]
    said = _train(student, *own, code=2)
    assert (
        "have different vocabularies" in said and "write a projection (nemotron3 distill projection)" in said
    )
    assert not (student / "train.log").exists() and not (student / "checkpoints").exists()

    projection = tmp_path / "projection.safetensors"
    nemotron3("distill", "projection", str(student), str(teacher), "--output", str(projection))
    _train(student, *own, "--distill", f"projection={projection},kind=p-kl", "--", "--log-interval", "1")
    curve = log.read(str(student / "train.log"))
    apart = [step.values["divergence"] for _, step in sorted(curve.steps.items())]
    assert len(apart) == 40
    first, last = sum(apart[:5]) / 5, sum(apart[-5:]) / 5
    assert 0 < last < 0.8 * first, apart

    said = nemotron3(
        "distill", "projection", str(teacher), str(student), "--projection", str(projection), code=2
    )
    assert "is for another tokenizer of the student" in said


@pytest.mark.full  # tests/post_training/distill/test_across.py has a step without a run
def test_two_teachers(tmp_path: Path) -> None:
    """Each has its tokenizer, projection, weight and layout; the run goes on with both, or is refused."""
    _write_texts(tmp_path)
    student, text = tmp_path / "student", ("--text", str(tmp_path / "student.jsonl"))
    both: list[str] = []
    for name, how in (("teacher", "kind=p-kl,weight=0.5"), ("other", "kind=h-kl,weight=0.25")):
        teacher, projection = str(tmp_path / name), str(tmp_path / f"{name}.safetensors")
        _train(tmp_path / name, "--text", str(tmp_path / f"{name}.jsonl"), steps=2)
        if not both:  # refused, but its tokenizer is there then
            _train(student, *text, "--teacher", teacher, code=2)
        nemotron3("distill", "projection", str(student), teacher, "--output", projection)
        both += ["--teacher", teacher, "--distill", f"{how},projection={projection}"]
    megatron = ["--", "--log-interval", "1", "--save-interval", "2"]
    step = interrupted(student, *_words(student, 40), *text, *both, "--pp", "2", *megatron)
    record = json.loads((student / "run.json").read_text())["parts"]["teacher"]
    assert (record["weight"], record["weight 2"]) == ("0.5", "0.25")
    assert record["projection"] != record["projection 2"] and record["weights"] != record["weights 2"]
    before = (student / "run.json").read_bytes()
    said = _train(student, *text, *both[:4], "--pp", "2", *megatron, code=2)
    assert (
        f"with teacher {tmp_path / 'teacher'} and {tmp_path / 'other'}, not {tmp_path / 'teacher'} (" in said
    )
    said = _train(student, *text, *both[:-1], f"{both[-1]},temperature=2", "--pp", "2", *megatron, code=2)
    assert "with another distillation (temperature 2 1.0 -> 2.0)" in said
    assert (student / "run.json").read_bytes() == before
    _train(student, *text, *both, "--pp", "2", *megatron, steps=step + 2)
    curve = log.read(str(student / "train.log")).steps
    assert step + 2 in curve and step >= 2
    # Megatron prints no negative value, which a mean of H-KL may have.
    assert all(one.values["divergence 1"] > 0 for one in curve.values())
    assert any(one.values.get("divergence 2", 0) > 0 for one in curve.values())
