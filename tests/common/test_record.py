"""Records of what a folder is the work of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import write_json


def _begin(folder: Path, content: dict[str, object]) -> None:
    def write(inside: Path) -> None:
        (inside / "data").write_text("written")

    record.begin(folder, "work.json", content, "copy", write)


def test_a_folder_begins_whole_and_begins_once(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _begin(folder, {"a": 1})
    assert json.loads((folder / "work.json").read_text()) == {"a": 1}
    assert (folder / "work.json").read_text() == '{\n "a": 1\n}\n'
    (folder / "data").write_text("changed since")
    _begin(folder, {"a": 1})
    assert (folder / "data").read_text() == "changed since"
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_a_folder_of_other_work_stays(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _begin(folder, {"a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"holds a copy with another b \(2 -> 3\): give another --output"):
        _begin(folder, {"a": 1, "b": 3})
    _begin(folder, {"a": 1})  # what an earlier version recorded beyond it does not count
    (folder / "work.json").unlink()
    with pytest.raises(ValueError, match="exists and is no copy"):
        _begin(folder, {"a": 1})


def test_nothing_stays_of_a_failure(tmp_path: Path) -> None:
    def fail(inside: Path) -> None:
        (inside / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        record.begin(tmp_path / "out", "work.json", {}, "copy", fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00", "1"])
def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: it "):
        record.read(tmp_path / "x.json")


def test_a_record_is_read_to_a_limit(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": "b" * 100})
    assert record.read(tmp_path / "x.json") == {"a": "b" * 100}
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        record.read(tmp_path / "x.json", limit=10)
    with pytest.raises(FileNotFoundError):
        record.read(tmp_path / "y.json")


def test_differences() -> None:
    old, new = {"same": "1", "--gone": "2", "other": "3"}, {"same": "1", "other": "4", "new": "x" * 50}
    changed = record.differences(old, new)
    assert changed == {"--gone": ("2", None), "other": ("3", "4"), "new": (None, "x" * 50)}
    assert record.details(changed) == f"gone 2 -> not given, other 3 -> 4, new not given -> {'x' * 37}..."
    assert record.differences(old, new, common=True) == {"other": ("3", "4")}
    many = record.details({str(i): ("a\n", None) for i in range(6)})
    assert many.startswith("0 a\\n -> not given, ") and many.endswith(", 2 more")
