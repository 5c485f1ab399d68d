"""The example of pruning and distillation runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "compress_minitron.py"


@pytest.mark.full
def test_example_runs(tmp_path: Path) -> None:
    words = ["--teacher-steps", "12", "--steps", "4", "--layers", "10", "--output", str(tmp_path)]
    words += ["--save", str(tmp_path / "saved")]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    names = ["| model", "| teacher, 12 steps", "| pruned", "| distilled", "| trained", "| from scratch"]
    assert [row[0] for row in rows] == names
    assert all(3 < float(row[1].split()[0]) < 9 for row in rows[1:])
    assert (tmp_path / "saved/latest_checkpointed_iteration.txt").read_text() == "release"
