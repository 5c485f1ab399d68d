"""The parts that stay are those of NVIDIA ModelOpt's pruning, where both have the same rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.golden.make_modelopt_pruning import CASES, build, run, summary

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests/golden/modelopt_pruning.json"
RECORDED: dict[str, Any] = json.loads(FILE.read_text())


def pruned(name: str) -> tuple[list[int], dict[str, Any], list[float]]:
    """By our importance and cut: the order of the layers, what is left, and the distances of the layers."""
    from megatron_nemotron3.post_training import compress
    from megatron_nemotron3.post_training.compress.importance import measure

    config, sizes = CASES[name]
    model = build(config)
    scores = measure(model, config, lambda: run(model))
    _, weights = compress.prune(model, scores, sizes)
    distances = [float(scores.values[f"decoder.layers.{i}. distance"]) for i in range(config.num_layers)]
    order = sorted(range(config.num_layers), key=lambda layer: -distances[layer])
    return order, summary({k: t for k, t in weights.items() if not k.endswith("_extra_state")}), distances


@pytest.mark.parametrize("name", CASES)
def test_the_same_parts_stay(name: str) -> None:
    """Every tensor that is left has the same elements, to the bit, and layers rank alike."""
    ((order, tensors, _),) = run_distributed(pruned, 1, name)
    recorded = RECORDED[name]
    assert order == recorded["layers"]
    assert tensors.keys() == recorded["tensors"].keys()
    assert {k for k, t in tensors.items() if t != recorded["tensors"][k]} == set()


def test_the_record_is_modelopts(tmp_path: Path) -> None:
    """Where ModelOpt is installed, it prunes what the file says."""
    site = os.environ.get("MODELOPT_SITE")
    if not site:
        pytest.skip("MODELOPT_SITE names no folder with nvidia-modelopt")
    words = [sys.executable, "-W", "ignore", "tests/golden/make_modelopt_pruning.py", str(tmp_path / "new")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), site))}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "new").read_text()) == RECORDED
