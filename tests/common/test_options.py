"""Options of a command that are the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from megatron_nemotron3.common.options import (
    NEEDED,
    add_command,
    add_option,
    add_options,
    argument,
    data_path_option,
    device_option,
    flag,
    from_arguments,
    json_flag,
    option,
    repeated,
    text_option,
)
from megatron_nemotron3.common.parser import OptionParser


@dataclass(frozen=True, kw_only=True)
class Shared:
    model: str | None = option("the model", "MODEL")
    only_here: bool = False
    size: float = option("its size", "N", default=1.5, hidden=["--sz"], least=1, most=2)


@dataclass(frozen=True, kw_only=True)
class More(Shared):
    only_here: bool = flag("an option of this class alone")


@dataclass(frozen=True, kw_only=True)
class Example:
    source: Path = argument("what to read", "DIR")
    target: Path | None = argument("where to write", "DIR", default=None)
    rows: int = option("rows", "N", default=NEEDED, spelling="--lines", least=1)
    shared: More
    kind: Literal["a", "b-c"] | None = option("the kind", group="more")
    place: Path | str | None = option("a place", "URL", parse=lambda text: text.upper())
    names: list[str] = repeated("names", "NAME")
    files: list[Path] | None = option("files", "FILE", nargs="+")
    every: float | None = option("seconds", "S", nargs="?", const=30.0, group="more")
    json: bool = json_flag()
    extra: list[str]


def _parser() -> OptionParser:
    parser = OptionParser(prog="example")
    add_options(parser, Example)
    parser.set_defaults(extra=["x"])
    return parser


def test_the_values_have_the_types_of_the_fields() -> None:
    words = "in out --lines 3 --model m --only-here --size 2 --kind B_C --place p --names a --names b"
    words += " --files f g --every --json"
    found = from_arguments(Example, _parser().parse_args(words.split()))
    assert found == Example(
        source=Path("in"),
        target=Path("out"),
        rows=3,
        shared=More(model="m", only_here=True, size=2.0),
        kind="b-c",
        place="P",
        names=["a", "b"],
        files=[Path("f"), Path("g")],
        every=30.0,
        json=True,
        extra=["x"],
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("in", "example: the following arguments are required: --lines"),
        ("in --lines x", "example: argument --lines: invalid int value: 'x'"),
        ("in --lines 1 --kind c", "example: argument --kind: invalid choice: 'c' (choose from a, b-c)"),
        ("in --lines 1 --moddel c", "example: unknown option --moddel; did you mean '--model'?"),
    ],
)
def test_a_wrong_word_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        _parser().parse_args(words.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(message) and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("in --lines 0", "--lines 0: give 1 or more"),
        ("in --lines 1 --size 0.5", "--size 0.5: give 1 to 2"),
        ("in --lines 1 --size nan", "--size nan: give 1 to 2"),
    ],
)
def test_a_number_out_of_its_bounds(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        from_arguments(Example, _parser().parse_args(words.split()))


def test_a_command_is_called_with_its_dataclass() -> None:
    parser = OptionParser(prog="example")
    add_command(parser, Shared, lambda options: int(options.size))
    for spelling in ("--size", "--sz"):
        given = parser.parse_args([spelling, "2"])
        assert given.run(given) == 2


def test_of_some_options_one_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OptionParser(prog="example")
    add_option(parser, "text", text_option("to read"))
    add_option(parser, "data_path", data_path_option())
    add_option(parser, "device", device_option())
    assert vars(parser.parse_args(["--text", "a"])) == {"text": "a", "data_path": None, "device": "auto"}
    with pytest.raises(SystemExit):
        parser.parse_args(["--text", "a", "--data-path", "b"])
    assert "argument --data-path: not allowed with argument --text" in capsys.readouterr().err
