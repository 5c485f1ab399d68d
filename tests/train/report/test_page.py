"""`nemotron3 report`: one page for any run, finished or not, with monitors or without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.common import lock
from megatron_nemotron3.launch.manifest import RunManifest
from megatron_nemotron3.precision import report as precision
from tests.common.test_bars import step
from tests.precision.test_report import rows
from tests.train.monitor.test_watch import every_kind, write

PARTS = {
    "model": {"name": "super-tiny", "--hidden-size": "128"},
    "precision": {},
    "launch": {"--seq-length": "512", "--train-iters": "10"},
}


def run(folder: Path, steps: int = 10, *, name: str = "super-tiny") -> Path:
    """The folder of a run that was logged up to a step."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {**PARTS, "model": {"name": name}}
    RunManifest(folder).write(parts, None, "nemotron3 train super --tiny --steps 10")
    lines = [step(n) for n in range(1, steps + 1)]
    lines += [" validation loss at iteration 5 | lm loss value: 5.047692E+00 | \n"] * (steps >= 5)
    (folder / "train.log").write_text("".join(lines))
    return folder


def page(folder: Path) -> str:
    assert cli.main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    # One file, and nothing from elsewhere.
    assert not re.search(r"<script|<link|https?://", text)
    assert all(source.startswith("data:image/") for source in re.findall(r'src="([^"]*)', text))
    return text


def pictures(text: str) -> list[str]:
    return re.findall(r'<img alt="([^"]*)"', text)


def test_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run")
    write(folder / "tensorboard", every_kind(2, 4))
    precision.append(folder, rows(10))
    text = page(folder)
    assert "finished at step 10 of 10" in text and "3,033,328" in text
    assert "nemotron3 train super --tiny --steps 10" in text and "megatron-core" in text
    assert "5.048 at step 5" in text and "4,096" in text  # tokens/s: 4 x 512 in half a second
    found = pictures(text)
    assert found[:4] == ["Losses", "Norm of the gradient", "Time of a step", "Tokens per second"]
    assert "MaxVio of the global batch" in found
    assert "precision at iteration 10" in text and "weight gradients exactly zero" in text
    assert "finished at step 10 of 10" in capsys.readouterr().out


def test_a_run_without_monitors_that_stopped(tmp_path: Path) -> None:
    text = page(run(tmp_path, 7))
    assert "stopped at step 7 of 10" in text and "No monitored series" in text
    assert "None was saved yet" in text and "<h2>Precision" not in text


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    """Megatron leaves it out of its line; it is not the loss of an earlier step."""
    log = run(tmp_path, 9) / "train.log"
    log.write_text(log.read_text() + re.sub(r"lm loss: \S+ \| ", "", step(10)))
    text = page(tmp_path)
    assert "finished at step 10 of 10" in text and "→ nan at step 10" in text


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """Before its first step and after it; a line that is half written counts as none."""
    folder = run(tmp_path, 0)
    with lock.held(folder / "checkpoints"):
        text = page(folder)
        assert "running, before the first step" in text and "No step was logged yet" in text
        (folder / "train.log").write_text(step(1) + step(2)[:30])
        assert "running, step 1 of 10" in page(folder)


def test_event_files_of_a_stock_script(tmp_path: Path) -> None:
    """Without our log, losses, rates and the state come from the event files."""
    losses = {
        "lm loss": [(1, 8.0), (2, 7.0)],
        "lm loss validation": [(2, 7.5)],
        "mtp_1 loss": [(1, 8.5), (2, 7.25)],
    }
    write(tmp_path, {**losses, "learning-rate": [(1, 1e-3), (2, 2e-3)]})
    text = page(tmp_path)
    assert pictures(text)[:2] == ["Losses", "Learning rate"]
    assert "logged up to step 2;" in text and "o step was logged" not in text
    rows = {
        "training loss": "8.000 → 7.000 at step 2",
        "MTP depth 1": "7.250",
        "held-out loss": "7.500 at step 2",
    }
    for name, value in rows.items():
        assert f"<tr><th>{name}</th><td>{value}</td></tr>" in text
    RunManifest(tmp_path).write(PARTS, None, "nemotron3 run pretrain_hybrid.py")
    assert "stopped at step 2 of 10;" in page(tmp_path)


def test_a_damaged_event_file_is_a_note(tmp_path: Path) -> None:
    folder = run(tmp_path)
    file = write(folder / "tensorboard", every_kind(2, 4))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(bytes(data))
    text = page(folder)
    assert "is corrupt at byte" in text and "finished at step 10" in text


def test_names_are_no_markup(tmp_path: Path) -> None:
    text = page(run(tmp_path, name="<b>mine</b>"))
    assert "&lt;b&gt;mine&lt;/b&gt;" in text and "<b>mine" not in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is not a folder"),
        (lambda path: path.mkdir(), "neither run.json nor train.log nor event files"),
    ],
)
def test_folders_that_are_no_runs(
    make: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "x")  # type: ignore[operator]
    assert cli.main(["report", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.rglob("report.html"))
