"""`load_checkpoint` on ranks: their parts are those of one process, their log-probabilities the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import load_checkpoint, save_checkpoint
from megatron_nemotron3.cpu.async_save import forked_results
from megatron_nemotron3.inference.generate import Engine, GenerationOptions, Sampling, generate, load
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Pieces, gather, pieces
from megatron_nemotron3.train.build import build_model
from tests.support.world import world_of_one

CONFIG = get("super-tiny").but(pattern="ME*E", vocab_size=512, num_moe_experts=8)
MODEL: dict[str, Any] = {"precision": "fp32", "backend": "torch", "auxiliary_losses": False}
PROMPTS = [[13, 20, 11, 7, 5], [400, 3, 3, 9, 77]]
NEW = 12
LAYOUTS = [
    pytest.param({"tp": 2, "ep": 2}, 2, "hf", id="TP2 EP2"),
    pytest.param({"pp": 2}, 2, "megatron", id="PP2"),
    pytest.param({"tp": 2, "pp": 2, "ep": 2}, 4, "megatron", id="TP2 PP2 EP2", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same random weights as a Megatron checkpoint and as a Hugging Face folder."""
    place = tmp_path_factory.mktemp("loaded")
    with world_of_one(), forked_results():
        model = build_model(CONFIG, **MODEL, seed=3)
        save_checkpoint(place / "megatron", model, torch.optim.SGD(model.parameters()), 1)
    assert cli.main(["convert", "to-hf", str(place / "megatron"), str(place / "hf")]) == 0
    return place


def parts(folder: str, sizes: dict[str, int], tokens: list[list[int]]) -> tuple[Pieces, torch.Tensor | None]:
    """What a rank has after `load_checkpoint`, and the log-probabilities of the tokens; on stages, none."""
    model = build_model(CONFIG, **MODEL, **sizes, seed=11)
    load_checkpoint(model, folder)
    if "pp" in sizes:
        return pieces([model]), None
    text = torch.tensor(tokens)
    positions = torch.arange(text.shape[1] - 1).expand(len(text), -1)
    with torch.no_grad():
        return pieces([model]), -model(text[:, :-1], positions, None, labels=text[:, 1:].contiguous())


@pytest.mark.parametrize(("sizes", "world", "kind"), LAYOUTS)
def test_ranks_hold_the_parts_of_one_process(
    sizes: dict[str, int], world: int, kind: str, folders: Path
) -> None:
    options = GenerationOptions(NEW, Sampling(temperature=1.0, seed=0), logprobs=True)
    rows = generate(Engine(load(folders / kind)), PROMPTS, options).rows
    tokens = [prompt + row.tokens for prompt, row in zip(PROMPTS, rows)]
    ((whole, alone),) = run_distributed(parts, 1, str(folders / "megatron"), {}, tokens, apart=True)
    ranks = run_distributed(parts, world, str(folders / kind), sizes, tokens)
    found, expected = gather([pieces for pieces, _ in ranks]), gather([whole])
    assert found.keys() == expected.keys()
    assert [key for key, value in found.items() if not value.equal(expected[key])] == []
    engine = torch.tensor([row.logprobs for row in rows])
    for trainer in [alone, *(logprobs for _, logprobs in ranks if logprobs is not None)]:
        # The tolerance of tests/parity.
        torch.testing.assert_close(trainer[:, len(PROMPTS[0]) - 1 :], engine, atol=1e-4, rtol=0)
