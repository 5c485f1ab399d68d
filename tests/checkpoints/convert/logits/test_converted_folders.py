"""`check_logits` on converted folders, and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face, open_megatron
from megatron_nemotron3.checkpoints.convert.conversion import (
    FromHfOptions,
    ToHfOptions,
    convert_from_hf,
    convert_to_hf,
)
from megatron_nemotron3.checkpoints.convert.logits.compare import LogitsCheckOptions, check_logits
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import pair
from tests.support.checkpoint_writer import write
from tests.support.world import world_of_one

pytest.importorskip("transformers")

CONFIG = get("super-tiny").but(pattern="M-*E", vocab_size=300, dense_ffn_hidden_size=128)
QUIET = LogitsCheckOptions(140, echo=lambda line: None)


@pytest.mark.filterwarnings("ignore")
def test_conversions_there_and_back(tmp_path: Path) -> None:
    with world_of_one():
        made = pair(CONFIG, tmp_path, seed=4, padded=20)
    keep = ("expert_bias", "e_score_correction_bias")
    tensors = {n: t if n.endswith(keep) else t.bfloat16() for n, t in made.megatron.content.items()}
    folders = [write(tmp_path / "megatron", tensors, iteration=1), tmp_path / "hf", tmp_path / "back"]
    convert_to_hf(folders[0], folders[1], ToHfOptions(config=CONFIG, workers=1))
    convert_from_hf(folders[1], folders[2], FromHfOptions(config=CONFIG, workers=1))
    hf = open_hugging_face(folders[1], model=CONFIG)
    for folder in (folders[0], folders[2]):
        opened = open_megatron(folder, model=CONFIG)
        report = check_logits(opened.weights, hf.weights, opened.config, QUIET)
        assert report.passed, report.problems
        assert torch.tensor([logits.scale for logits in report.logits]).min() > 0.3


@pytest.mark.full
@pytest.mark.parametrize("words", [("150",), ("4", "whole")], ids=" ".join)
def test_memory_at_the_real_widths_of_super(words: tuple[str, ...]) -> None:
    """One layer of each kind and the MTP block, or all 88 layers; an E layer's 512 experts (5.6 GB) are never
    all loaded.

    Seen: 1.4 GiB. transformers' own block of one such layer would take 11.3 GB in FP32.
    """
    command = [sys.executable, "-m", "tests.support.synthetic_checkpoint", "super", *words]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["passed"]
    assert result["peak"] < result["bound"] < 2.5 * 2**30
