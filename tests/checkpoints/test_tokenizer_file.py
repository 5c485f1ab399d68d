"""A tokenizer of others takes no more than its texts account for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.checkpoints.folders import require_tokenizer
from megatron_nemotron3.checkpoints.tokenizer_file import MOST_IDS, repeats_repeated, require_bounded
from megatron_nemotron3.common import limits
from megatron_nemotron3.inference.generate.text import Tokenizer
from megatron_nemotron3.train.data import train_tokenizer
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary

#: Patterns of released tokenizers (GPT-2's, o200k's, DeepSeek's digits, Bloom's), and what only looks nested.
RELEASED = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}]+[\r\n/]*|\s*[\r\n]+",
    r"(?=(\d{3})+(?!\d))",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\(a+\)+|[(a+)]+|(?:a++b)+|(a+)b+",
)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def with_pattern(folder: Path, pattern: str) -> Path:
    train_tokenizer(["one two three"], 300, folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pre_tokenizer": split(pattern)}))
    return file


def replaced(text: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": new}


@pytest.mark.parametrize("pattern", RELEASED)
def test_patterns_of_released_tokenizers_pass(pattern: str, tmp_path: Path) -> None:
    assert not repeats_repeated(pattern)
    require_bounded(with_pattern(tmp_path, pattern))


def test_a_pattern_whose_time_grows_faster_than_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it is repeated twice; 4,000 equal characters take half a minute."""
    file = with_pattern(tmp_path, "(?=q*q*[xy])q")
    monkeypatch.setattr(limits, "SECONDS", 1)
    with pytest.raises(ValueError, match="takes more than 1 s"):
        require_bounded(file)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(?:a*b)*", "((a|b+))*c", "(?i:x{2,})+", "(?=(a+)+b)"])
def test_a_repeated_repetition_is_found(pattern: str) -> None:
    assert repeats_repeated(pattern)


def test_what_a_tokenizer_may_not_do(tmp_path: Path) -> None:
    """Everything that reads one refuses it before it is used."""
    train_tokenizer(["one two three"], 300, tmp_path)
    file = tmp_path / "tokenizer.json"
    good = json.loads(file.read_text())
    require_tokenizer(tmp_path)
    vocabulary = {**good["model"]["vocab"], "far": MOST_IDS}
    far = {**good["added_tokens"][0], "id": 2**32 - 1, "content": "far"}
    chain = {"type": "Sequence", "normalizers": [replaced("e", "ee")] * 40}
    hostile: dict[str, dict[str, Any]] = {
        r"make 1\.1e\+12 characters of one": {"normalizer": chain},
        "make 1e.06 characters of one": {"normalizer": {"type": "Prepend", "prepend": "x" * 1_000_000}},
        "repeats a group that repeats something": {"pre_tokenizer": split("(a+)+$")},
        "the id 4,294,967,295: ids below": {"added_tokens": [*good["added_tokens"], far]},
        f"the id {MOST_IDS:,}": {"model": {**good["model"], "vocab": vocabulary}},
    }  # fmt: skip
    for message, changed in hostile.items():
        file.write_text(json.dumps({**good, **changed}))
        for read in (require_tokenizer, Tokenizer, ByteVocabulary):
            with pytest.raises(ValueError, match=message):
                read(tmp_path)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="not a tokenizer"):
        require_bounded(file)
    spaces = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced(" ", "▁")]}
    file.write_text(json.dumps({**good, "normalizer": spaces}))
    require_bounded(file)
