"""examples/omni_learns.py: the loss falls, everything is written, and layouts train as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.models.omni import get_omni
from megatron_nemotron3.train.omni.encoders import SoundEncoder, VisionEncoder
from tests.support.omni_data import require_media
from tests.support.programs import run_python

require_media()

ROOT = Path(__file__).parents[3]


def _learn(output: Path, *words: str) -> dict[str, Any]:
    """Run the example as a user does; return its results."""
    command = [sys.executable, str(ROOT / "examples/omni_learns.py"), "--output", str(output), *words]
    env = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert (output / "learns.png").stat().st_size > 10_000
    results: dict[str, Any] = json.loads((output / "results.json").read_text())
    return results


@pytest.mark.full
def test_it_reads_and_hears_in_every_layout(tmp_path: Path) -> None:
    """Held-out digits and words are named, which no model does that does not hear and see them.

    Without espeak-ng sounds are tunes, and words come later: after 300 steps none, after 600 a third.
    The script itself fails if colocated or disjoint ranks differ from one process in loss or gradient norm.
    """
    results = _learn(tmp_path / "run", "--steps", "600", "--blind-steps", "60")
    seeing = results["with encoders"]["scores"]["600"]
    blind = results["without encoders"]["scores"]["60"]
    assert seeing["audio"] > 0.7 > 0.35 > blind["audio"]
    assert seeing["image"] > 0.03 > 0.01 > blind["image"]
    assert set(results["differences to one process"]) == {"colocated", "disjoint"}
    run = tmp_path / "run"
    words = [str(run / "checkpoints"), "--tokenizer", str(run / "hf"), "--chat"]
    for number in range(10):  # the first is a zero, the next a one, …
        words += ["--audio", str(run / f"held_out/{number}.wav"), "--prompt", "digit?"]
    done = run_python(["-m", "megatron_nemotron3", "generate", *words, "--max-new-tokens", "4"], ROOT)
    said = done.stdout.splitlines()[1::2]
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    assert sum(one == digit for one, digit in zip(said, digits)) >= 7, done.stdout + done.stderr


def test_what_is_held_out_was_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import omni_task as task

    assert not set(task.words("train")) & set(task.words("held_out"))
    assert len(task.words("train") + task.words("held_out")) == round(1 / task.CHANCE["image"])
    for names in (task.FONTS, task.VOICES):
        assert names["train"] and names["held_out"] and not set(names["train"]) & set(names["held_out"])


def test_initial_weights_of_narrow_encoders_let_media_through() -> None:
    """As transformers draws them, 6e-8 of a sound reaches the layers, and positions are 4 % of patches."""
    tiny = get_omni("nano-omni-tiny")
    assert tiny is not None and tiny.sound is not None
    generator = torch.Generator().manual_seed(1)
    heard = torch.ones(1, 60, dtype=torch.bool)
    with torch.no_grad():
        sound = SoundEncoder(tiny.sound, seed=1).subsampling(
            torch.randn(1, 60, 32, generator=generator), heard
        )
        embeddings = VisionEncoder(tiny.vision, seed=1).embeddings
        patches = torch.randn(12, 768, generator=generator) @ embeddings.patch_projection.weight.T
    assert 0.1 < float(sound.std()) < 3
    assert 0.2 < float(embeddings.position_embedding.std() / patches.std()) < 2
