"""Decoding with a CUDA graph. On a CPU its operations run one by one, with the same fixed memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.generate import GenerationOptions, generate
from megatron_nemotron3.generate.graphs import GraphedStep
from megatron_nemotron3.generate.moe import MixtureOfExperts
from megatron_nemotron3.generate.sampling import Sampling
from megatron_nemotron3.generate.weights import read_weights
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import InMemory
from tests.support.engines import CONTEXT, close, tensors, tiny

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (5, 40, 1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "cpu":
        return tiny("super")[0]
    config = get("super-tiny")
    return Engine(
        read_weights(InMemory(tensors(config), Path()), config, device=request.param), max_context=CONTEXT
    )


def prompts() -> list[list[int]]:
    _, ids = tiny("super")
    return [ids[i % 2, 10 : 10 + n].tolist() for i, n in enumerate(LENGTHS)]


def test_logits_are_those_of_passes(engine: Engine) -> None:
    """Rows of different lengths, more steps than the first caches have room for."""
    plain, own = engine.new_state(3, 16), engine.new_state(3, 16)
    for state in (plain, own):
        engine.prefill(prompts(), state)
    graphed = GraphedStep(engine, own, 64)
    ids = tiny("super")[1]
    for position in range(20):
        tokens = ids[[0, 1, 0], [position, position, position + 30]].unsqueeze(1).to(engine.device)
        close(graphed(tokens), engine.forward(tokens, plain).logits.squeeze(1))
    assert own.lengths == plain.lengths == [25, 60, 21]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=50, top_p=0.95, seed=3)])
def test_text_is_that_of_plain_decoding(engine: Engine, sampling: Sampling) -> None:
    """Also while rows end and leave the batch."""

    def text(graphs: bool) -> list[list[int]]:
        def ends(row: int, token: int) -> bool:
            counts[row] += 1
            return counts[row] == 4 + 3 * row

        counts = [0, 0, 0]
        options = GenerationOptions(12, sampling=sampling, chunk=7, graphs=graphs)
        return [row.tokens for row in generate(engine, prompts(), options, ends).rows]

    found = text(graphs=True)
    assert [len(row) for row in found] == [4, 7, 10]
    assert found == text(graphs=False)


def test_the_room_ends(engine: Engine) -> None:
    state = engine.new_state()
    engine.prefill([[1, 2, 3]], state)
    with pytest.raises(ValueError, match="room=2, but a row has 3 tokens"):
        GraphedStep(engine, state, 2)
    graphed = GraphedStep(engine, state, 4)
    token = torch.tensor([[4]], device=engine.device)
    graphed(token)
    with pytest.raises(ValueError, match="a row has 4 tokens already, room=4"):
        graphed(token)


def test_what_waits_for_the_host_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixtureOfExperts, "needs_counts", lambda self, tokens, device: tokens > 1)
    GraphedStep(engine, engine.new_state(1), 4)
    with pytest.raises(ValueError, match="2 rows at once sort tokens by expert"):
        GraphedStep(engine, engine.new_state(2), 4)


def test_many_rows_wait_for_the_host() -> None:
    """On a GPU: what the products of a whole batch read at once is limited."""
    layer = next(x for x in tiny("super")[0].weights.layers if isinstance(x, MixtureOfExperts))
    assert not layer.needs_counts(1, "cuda")
    assert layer.needs_counts(10**6, "cuda")


def test_graphs_with_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="graphs=True with draft=2"):
        GenerationOptions(5, draft=2, graphs=True)
