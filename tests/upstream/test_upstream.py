"""The recorded results of Megatron's own unit tests, and one file of them run again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.upstream.__main__ import main, version_of
from tests.upstream.page import OTHERWISE, RESULTS

ROOT = os.environ.get("MEGATRON_LM_DIR")
FILE = "ssm/test_mlp_layer.py"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_passes_with_stock_and_not_with_ours_is_named(path: Path) -> None:
    tests = json.loads(path.read_text())["tests"]
    lost = [name for name, (stock, ours) in tests.items() if stock[0] == "passed" != ours[0]]
    assert set(lost) == set(OTHERWISE) & set(tests)
    passed = [sum(outcomes[at][0] == "passed" for outcomes in tests.values()) for at in (0, 1)]
    assert passed[1] > passed[0] > 0


@pytest.mark.full
@pytest.mark.skipif(not ROOT, reason="MEGATRON_LM_DIR names no Megatron-LM checkout")
def test_results_are_reproduced(tmp_path: Path) -> None:
    checkout = Path(ROOT or "")
    output = tmp_path / "results.json"
    words = ["--revision", "any", "--files", FILE, "--output", str(output)]
    assert main(["--megatron-lm", str(checkout), *words]) == 0
    found = json.loads(output.read_text())["tests"]
    recorded = json.loads((RESULTS / f"{version_of(checkout)}.json").read_text())["tests"]
    assert found == {name: value for name, value in recorded.items() if name.startswith(FILE)} != {}
