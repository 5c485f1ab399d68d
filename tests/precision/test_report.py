"""The file and the summary of a precision report; and the command that prints it again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.precision import report
from megatron_nemotron3.precision.report import GRADIENT, ReportError, ReportRow, append, read, summary


def row(
    iteration: int = 1, layer: str = "layer_001", tensor: str = "fprop.x", **changes: object
) -> ReportRow:
    values: dict[str, object] = {
        "module": "mixer.in_proj",
        "format": "nvfp4",
        "used": True,
        "elements": 100,
        "zeros": 0.0,
        "flushed": 0.07,
        "sqnr_db": 20.4,
        "amax": 3.5,
    }
    return ReportRow(iteration=iteration, layer=layer, tensor=tensor, **{**values, **changes})  # type: ignore[arg-type]


def rows(iteration: int) -> list[ReportRow]:
    """Two Mamba layers, experts and an MTP layer."""
    mamba = [
        row(iteration, layer, tensor, module=f"mixer.{name}", format=fmt, flushed=share)
        for layer, share in (("layer_001", 0.07), ("layer_003", 0.35))
        for name, fmt in (("in_proj", "nvfp4"), ("out_proj", "mxfp8"))
        for tensor in ("fprop.x", "fprop.weight")
    ]
    fc2 = "mlp.experts.linear_fc2"
    experts = [
        row(iteration, "layer_002", "dgrad.dy", module=fc2, flushed=0.2, worst_expert=17, worst=0.9),
        row(iteration, "layer_002", GRADIENT, module=fc2, zeros=0.5, flushed=math.nan, sqnr_db=math.nan,
            elements=300, worst_expert=3, worst=1.0),
    ]  # fmt: skip
    gradient = row(iteration, "layer_001", GRADIENT, flushed=math.nan, sqnr_db=math.nan)
    return [*mamba, *experts, gradient, row(iteration, "mtp_layer_2", flushed=0.01)]


def test_there_and_back(tmp_path: Path) -> None:
    """A resumed run repeats an iteration, and one that was killed leaves half a line."""
    append(tmp_path / "new", rows(1))
    append(tmp_path / "new", rows(100))
    assert list(map(str, read(tmp_path / "new"))) == list(map(str, [*rows(1), *rows(100)]))
    append(tmp_path, [row(5), row(10)])
    append(tmp_path, [row(10, flushed=0.5)])
    assert [(r.iteration, r.flushed) for r in read(tmp_path)] == [(5, 0.07), (10, 0.5)]
    file = tmp_path / report.FILE
    file.write_text(file.read_text()[:-4])
    assert [(r.iteration, r.flushed) for r in read(tmp_path)] == [(5, 0.07), (10, 0.07)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: train with --log-precision"),
        ("", ":1 is not the header"),
        ("a,b\n1,2\n", ":1 is not the header iteration,layer"),
        (",".join(ReportRow._fields) + "\n", "holds no measurement"),
        (",".join(ReportRow._fields) + "\n1,layer_001\n", ":2 is malformed .2 cells instead of 13"),
        (",".join(ReportRow._fields) + "\n1,l,m,nvfp4,other,1,5,0,0,0,0,-1,\n", "unknown tensor 'other'"),
        (",".join(ReportRow._fields) + "\nx,l,m,nvfp4,fprop.x,1,5,0,0,0,0,-1,\n", ":2 is malformed"),
        ("\u00e9\n", "is no precision report"),
    ],
)
def test_what_is_no_report(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / report.FILE).write_text(content, encoding="utf-8")
    with pytest.raises(ReportError, match=message):
        read(tmp_path)
    assert cli.main(["precision", "--report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_summary() -> None:
    lines = list(summary([*rows(1), *rows(100)]))
    text = "\n".join(lines)
    assert "iteration 100 (2 measured from 1 on), as computed" in lines[0]
    table = {tuple(line.split()[:3]): line for line in lines[2:]}
    x = table["mixer.in_proj", "nvfp4", "X"]
    assert "7.00%" in x and "35.00% layer_003" in x and "20.4" in x
    assert ("mixer.out_proj", "mxfp8", "X") in table and ("mixer.out_proj", "nvfp4", "X") not in table
    assert "20.00% layer_002 (expert 17: 90.00%)" in table["mlp.experts.linear_fc2", "nvfp4", "dY"]
    assert "exactly zero: 37.500% of 400 elements; worst 50.000%, layer_002 mlp.experts.linear_fc2" in text
    other = next(summary([row(1, used=False)]))
    assert "as NVFP4 would compute" in other


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path, rows(1))
    assert cli.main(["precision", "--report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == list(summary(rows(1)))
    assert [p.name for p in tmp_path.iterdir()] == [report.FILE]


@pytest.mark.parametrize(
    "words",
    [["precision"], ["precision", "super", "--report", "x"], ["precision", "--report", "x", "--yaml", "y"]],
)
def test_bad_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert "give the NAME of a model, or --report DIR alone" in capsys.readouterr().err
