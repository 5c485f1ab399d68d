"""Lines for a person, or one JSON document on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.common.output import part, print_json, result, say, table

Capture = pytest.CaptureFixture[str]


def _refuse(word: str) -> None:
    raise AssertionError(word)


def read(text: str) -> Any:
    """The document; stricter than `json.loads`, which takes NaN."""
    return json.loads(text, parse_constant=_refuse)


def work(fail: bool = False) -> None:
    print("a library's own line")
    say("one", n=1, found=[{"name": "a"}])
    with part() as inside:
        say("two", n=2)
    say("three", found=[{"name": "b"}], inside=inside)
    if fail:
        raise ValueError("wrong")


def test_lines(capsys: Capture) -> None:
    with result(False):
        work()
    assert capsys.readouterr().out == "a library's own line\none\ntwo\nthree\n"


def test_control_characters_of_a_file_are_escaped(capsys: Capture) -> None:
    """They would clear the screen, or rewrite what stands there."""
    say("name  a\x1b[2J\x9b1m\rb\n\tc")
    assert capsys.readouterr().out == "name  a\\x1b[2J\\x9b1m\\rb\n\tc\n"


def test_one_document(capsys: Capture) -> None:
    with result(True):
        work()
    printed = capsys.readouterr()
    assert read(printed.out) == {"n": 1, "found": [{"name": "a"}, {"name": "b"}], "inside": {"n": 2}}
    assert printed.err == "a library's own line\n"


def test_no_document_of_what_failed(capsys: Capture) -> None:
    with pytest.raises(ValueError, match="wrong"), result(True):
        work(fail=True)
    assert capsys.readouterr().out == ""
    say("a line again")
    assert capsys.readouterr().out == "a line again\n"


def test_numbers_that_json_does_not_have(capsys: Capture) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": (Path("x/y"), True), 3: None})
    assert read(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": ["x/y", True], "3": None}


def test_a_table_has_columns_as_wide_as_their_widest_cell() -> None:
    rows = [("name", "tokens", ""), ("a", 1_000_000, "x"), ("longer name", 7, "")]
    assert table(rows, "lrl") == ["name          tokens", "a            1000000  x", "longer name        7"]
    assert table([("a", "b"), ("cc", "d")]) == ["a   b", "cc  d"]
    assert table([]) == []
