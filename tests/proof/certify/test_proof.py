"""A whole proof, as a user starts it: what is proven, and nothing else on the terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: Lines of a bar that is not on a terminal.
BAR = re.compile(r"certify: \d+ %(, [\d.]+ %/s)?(, [\d,]+ s left)?")


@pytest.mark.full
def test_a_whole_proof(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    environment.pop("MEGATRON_LM_DIR", None)
    words = ["certify", "nano", "--tp", "2", "--ep", "2", "--dp", "2", "--output", str(tmp_path / "made")]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_nemotron3", *words],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [line for line in done.stderr.splitlines() if not BAR.fullmatch(line)] == []
    assert "Warning" not in done.stdout and "INFO" not in done.stdout
    data = json.loads((tmp_path / "made" / "certificate.json").read_text())
    proven = {one["property"] for one in data["findings"] if one["state"] == "pass"}
    assert proven >= {
        "accepted by Megatron", "rules", "number formats", "number formats of the built model",
        "losses", "gradient norms", "gradients", "expert biases", "weights",
        "weights after two steps (script)", "weights after resuming", "optimizer state after resuming",
        "gradients after loading", "Hugging Face export", "monitors of the first step",
    }  # fmt: skip
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("nemotron3-certify")]
