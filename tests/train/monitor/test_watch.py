"""`nemotron3 report monitors`: a picture or one clear line, never half of either."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_nemotron3 import cli
from megatron_nemotron3.models.series import KINDS
from megatron_nemotron3.train.log import NAMED
from megatron_nemotron3.train.monitor import events
from tests.train.monitor.test_alarms import FIRST, HEALTHY, flat, history, stops_at

PNG = b"\x89PNG\r\n\x1a\n"


def write(folder: Path, series: dict[str, list[tuple[int, float]]], suffix: str = "") -> Path:
    """One event file."""
    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for tag, points in series.items():
            for iteration, value in points:
                writer.add_scalar(tag, value, iteration)
    return max(folder.glob(events.PATTERN), key=lambda file: file.stat().st_mtime_ns)


def every_kind(layers: int, points: int = 20) -> dict[str, list[tuple[int, float]]]:
    return {
        f"{kind}/layer_{layer + 1:03d}": [(10 * i, 1.0 + layer + i / 10) for i in range(1, points + 1)]
        for kind in KINDS
        for layer in range(layers)
    } | {"lm loss": [(i, 10.0 / i) for i in range(1, 10 * points)]}


def nothing_left(folder: Path) -> bool:
    return not [f for f in folder.rglob("*") if f.is_file() and "tfevents" not in f.name]


@pytest.mark.parametrize(("points", "layers"), [pytest.param(1, 2, marks=pytest.mark.full), (20, NAMED + 8)])
def test_plots_few_and_many_lines(
    layers: int, points: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, every_kind(layers, points))
    output = tmp_path / "elsewhere.png"
    assert cli.main(["report", "monitors", str(tmp_path), "--output", str(output)]) == 0
    assert output.read_bytes()[:8] == PNG
    assert f"{len(KINDS)} series of up to {layers} layers, {points} points" in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))


def test_says_what_the_warnings_would_have_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the whole history, so also where the run itself began anew after every resume."""
    series = history(0, stops_at(0.5, flat(FIRST), 12 - FIRST), HEALTHY)
    cut = {tag: (points[:200], points[200:]) for tag, points in series.items()}
    for part in (0, 1):
        write(tmp_path, {tag: halves[part] for tag, halves in cut.items()}, suffix=f".{part}")
    assert cli.main(["report", "monitors", str(tmp_path)]) == 0
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if "WARNING" in line)
    assert "MaxVio of layer 2" in warning and "Ultra" in warning


def test_a_resumed_run_overwrites_what_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, {"max_vio/layer_001": [(i, 1.0) for i in range(1, 9)]}, suffix=".0")
    write(tmp_path, {"max_vio/layer_001": [(5, 2.0), (6, 2.0)]}, suffix=".1")
    points = events.read(events.find(tmp_path))["max_vio/layer_001"]
    assert points == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]


def test_a_clock_that_was_set_back_loses_no_steps(tmp_path: Path) -> None:
    """The names of event files begin with the time: here the resumed run has the first one."""
    write(tmp_path, {"max_vio/layer_001": [(3, 2.0), (4, 2.0)]}, suffix=".0")
    write(tmp_path, {"max_vio/layer_001": [(1, 1.0), (2, 1.0)]}, suffix=".1")
    points = events.read(events.find(tmp_path))["max_vio/layer_001"]
    assert points == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_run_that_still_writes(tmp_path: Path) -> None:
    """An incomplete last record is left out, wherever it ends."""
    file = write(tmp_path, {"max_vio/layer_001": [(1, 1.0), (2, 2.0)]})
    whole = file.read_bytes()
    for missing in (1, 5, 20, 40):
        file.write_bytes(whole[:-missing])
        assert events.read([file]) == {"max_vio/layer_001": [(1, 1.0)]}


def broken(folder: Path, how: str) -> None:
    if how == "no folder":
        folder.rmdir()
    elif how == "no event files":
        (folder / "other").write_text("x")
    elif how == "two runs":
        for name in ("a", "b"):
            write(folder / name, {"max_vio/layer_001": [(1, 1.0)]})
    elif how == "not ours":
        write(folder, {"lm loss": [(1, 1.0)]})
    elif how == "noise":
        (folder / "events.out.tfevents.1").write_bytes(bytes(range(256)) * 4)
    else:
        file = write(folder, every_kind(1))
        data = bytearray(file.read_bytes())
        if how == "flipped byte":
            data[len(data) // 2] ^= 0xFF
        elif how == "absurd length":
            data[:8] = struct.pack("<Q", 1 << 60)
        file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no folder", "is not a folder: give the one of --tensorboard-dir"),
        ("no event files", "holds no TensorBoard event files"),
        ("two runs", "holds the event files of 2 runs, name one"),
        ("not ours", "hold no monitored series"),
        ("noise", "is corrupt at byte 0"),
        ("absurd length", "is corrupt at byte 0"),
        ("flipped byte", "is corrupt at byte "),
    ],
)
def test_bad_input(how: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "board"
    folder.mkdir()
    broken(folder, how)
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["report", "monitors", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and len(printed.err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, every_kind(2))
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert cli.main(["report", "monitors", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "package tensorboard" in error and "pip install" in error and nothing_left(tmp_path)
