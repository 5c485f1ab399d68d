"""What is left along each axis is a model: Megatron loads it, it trains, transformers computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.cli import main
from megatron_nemotron3.launch import Launch
from megatron_nemotron3.models.command import model as own_model
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.post_training.compress.silence import random_scores
from tests.post_training.compress.test_command import load_strictly
from tests.post_training.compress.test_cut import CONFIGS, EVERYTHING
from tests.post_training.compress.test_importance import write
from tests.support.model_mapping import unclamped

TEXT = torch.randint(0, 2048, (2, 41), generator=torch.Generator().manual_seed(4))


def logits_and_training(folder: Path) -> tuple[torch.Tensor, list[float], list[str]]:
    """Logits of a checkpoint, losses of a few steps on one batch, and the parameters that did not move."""
    config = own_model(str(folder / "model.json"))
    model = load_strictly(folder, Launch.of(config, precision="fp32", backend="torch"))
    ids, positions = TEXT[:, :-1], torch.arange(40).expand(2, -1)
    with torch.no_grad():
        logits = model.eval()(ids, positions, None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-15), []
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ids, positions, None, labels=TEXT[:, 1:].contiguous()).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    return logits, losses, still


def by_transformers(folder: Path) -> torch.Tensor:
    """Logits of a Hugging Face folder."""
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    unclamped(theirs)
    with torch.no_grad():
        found: torch.Tensor = theirs(TEXT[:, :-1]).logits
    return found


@pytest.mark.parametrize("name", ["super", pytest.param("nano-4b", marks=pytest.mark.full)])
def test_a_pruned_model_is_a_model(tmp_path: Path, name: str) -> None:
    """Pruned along every axis that it has."""
    model, scores, out, hf = (tmp_path / part for part in ("model", "scores", "out", "hf"))
    run_distributed(write, 1, model, CONFIGS[name])
    random_scores(CONFIGS[name]).save(scores)
    sizes = EVERYTHING[name] | ({"moe_router_topk": 4} if name == "super" else {})
    words = ["prune", str(model), "--scores", str(scores), "--output", str(out)]
    assert main([*words, "--sizes", *(f"{n}={v}" for n, v in sizes.items())]) == 0
    ((logits, losses, still),) = run_distributed(logits_and_training, 1, out)
    assert losses[-1] < losses[0] - 0.01
    assert not still
    assert main(["convert", "to-hf", str(out), str(hf)]) == 0
    expected = by_transformers(hf)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits[..., : expected.shape[-1]], expected, rtol=0, atol=1e-4)
