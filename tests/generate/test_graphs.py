"""Decoding with a CUDA graph. On a CPU its operations are recorded once and repeated on the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton  # noqa: F401  (imports of Triton's modules make tensors)

from megatron_nemotron3.generate import batch, graphed_drafts, graphs, linear, moe
from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.generate import GenerationOptions, Speculation, generate
from megatron_nemotron3.generate.graphed_drafts import GraphedDrafts
from megatron_nemotron3.generate.graphs import GraphedStep
from megatron_nemotron3.generate.mamba import _token_ranges
from megatron_nemotron3.generate.moe import MixtureOfExperts
from megatron_nemotron3.generate.mtp import MTP
from megatron_nemotron3.generate.sampling import Sampling, accept_greedy
from megatron_nemotron3.generate.weights import read_weights
from megatron_nemotron3.layers.grouped import squared_relu_experts
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import InMemory
from tests.support.engines import CONTEXT, agreeing, close, engine_of, tensors, tiny
from tests.support.fake_cuda import DEVICE, Device, HostWait, fake_cuda

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (5, 40, 1)


@pytest.fixture(params=["cpu", "replayed", pytest.param("cuda", marks=on_gpu)])
def engine(request: pytest.FixtureRequest) -> Engine:
    """On a CPU a step runs anew each time, or is repeated from a recording."""
    if request.param == "replayed":
        request.getfixturevalue("replayed_graphs")
    if request.param != "cuda":
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
    with pytest.raises(ValueError, match="a row has 3 tokens, and room=2: 0 more do not fit"):
        GraphedStep(engine, state, 2)
    graphed = GraphedStep(engine, state, 4)
    token = torch.tensor([[4]], device=engine.device)
    graphed(token)
    with pytest.raises(ValueError, match="a row has 4 tokens, and room=4: 1 more do not fit"):
        graphed(token)


def test_what_waits_for_the_host_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixtureOfExperts, "needs_counts", lambda self, tokens, device: tokens > 1)
    GraphedStep(engine, engine.new_state(1), 4)
    with pytest.raises(ValueError, match="2 tokens at once are sorted by expert"):
        GraphedStep(engine, engine.new_state(2), 4)


def test_many_rows_wait_for_the_host() -> None:
    """On a GPU: what the products of a whole batch read at once is limited."""
    layer = next(x for x in tiny("super")[0].weights.layers if isinstance(x, MixtureOfExperts))
    assert not layer.needs_counts(1, "cuda")
    assert layer.needs_counts(10**6, "cuda")


@pytest.mark.parametrize(
    ("draft", "strength", "sampling"),
    [
        pytest.param(draft, strength, sampling, marks=() if number % 2 == sampled else pytest.mark.full)
        for number, (draft, strength) in enumerate([(1, 0.03), (3, 0.03), (7, 0.03), (2, 0.0), (2, 1.0)])
        for sampled, sampling in enumerate([Sampling(), Sampling(1.0, top_k=50, top_p=0.95, seed=3)])
    ],
)
def test_text_with_drafts(replayed_graphs: None, draft: int, strength: float, sampling: Sampling) -> None:
    """As without graphs, and as many drafts are accepted: rows of different lengths, some shorter than the
    drafts, that leave the batch at different times."""
    engine = agreeing(strength)

    def run(graphs: bool) -> tuple[list[list[int]], Speculation]:
        def ends(row: int, token: int) -> bool:
            counts[row] += 1
            return counts[row] == 8 + 9 * row

        counts = [0, 0, 0]
        options = GenerationOptions(24, sampling=sampling, draft=draft, chunk=7, graphs=graphs)
        found = generate(engine, prompts(), options, ends)
        return [row.tokens for row in found.rows], found.speculation

    text, speculation = run(graphs=True)
    assert [len(row) for row in text] == [8, 17, 24]
    assert (text, speculation) == run(graphs=False)


def test_drafts_in_every_kind_of_layer(replayed_graphs: None) -> None:
    """An MTP block with a Mamba-2 layer and a dense one keeps states that are rolled back, too."""
    engine = engine_of(get("super-tiny").but(mtp_pattern="M*-E", dense_ffn_hidden_size=64))
    texts = []
    for graphed in (False, True):
        options = GenerationOptions(16, sampling=Sampling(1.0, seed=1), draft=3, graphs=graphed)
        texts.append([row.tokens for row in generate(engine, prompts(), options).rows])
    assert texts[0] == texts[1]


def test_drafts_need_tokens_and_room() -> None:
    engine = agreeing(0.03)
    state, mtp, newest = engine.new_state(), MTP(engine, 1, 3), torch.tensor([4])
    engine.prefill([[1, 2]], state, on_chunk=mtp.append)
    with pytest.raises(ValueError, match="a row has 2 tokens, but 3 depths wait"):
        GraphedDrafts(engine, state, mtp, newest, Sampling(), 20)
    engine.prefill([[3]], state, on_chunk=mtp.append)
    step = GraphedDrafts(engine, state, mtp, newest, Sampling(), 6)
    with pytest.raises(ValueError, match="a row has 3 tokens, and room=6: 4 more do not fit"):
        step([3], None)


def test_too_many_drafts_are_refused_before_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = agreeing(0.03)
    monkeypatch.setattr(MixtureOfExperts, "needs_counts", lambda self, tokens, device: tokens > 4)
    monkeypatch.setattr(Engine, "prefill", None)
    with pytest.raises(ValueError, match="5 tokens at once are sorted by expert.*fewer rows or drafts"):
        generate(engine, [[1, 2, 3, 4, 5]], GenerationOptions(5, draft=4, graphs=True))


def test_grouped_products_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes with counts that stay there, against the product of each expert."""
    config = get("super-tiny")
    made = {name: t.bfloat16() for name, t in tensors(config).items()}
    weights = read_weights(InMemory(made, Path()), config)
    layer = next(x for x in weights.layers if isinstance(x, MixtureOfExperts))
    assert layer.needs_counts(10**6, "cpu") == linear.packs(torch.bfloat16) and not layer.needs_counts(
        10**6, "cuda"
    )
    generator = torch.Generator().manual_seed(0)
    expert = torch.randint(layer.experts, (60,), generator=generator)
    expert[expert == 1] = 0  # one expert without tokens
    rows = torch.randn(60, layer.inner, generator=generator).bfloat16()
    weight = torch.rand(60, generator=generator)
    found = layer._grouped_products(rows, weight, expert)
    counts = torch.bincount(expert, minlength=layer.experts).tolist()
    wanted = squared_relu_experts(rows, weight, *layer.each, counts)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max().item())


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=50, top_p=0.95)])
def test_the_host_waits_once_a_step(
    sampling: Sampling, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CUDA device that is not there, in BF16: only for the new tokens, not in the graph."""
    monkeypatch.setattr(moe, "GATHERED_ELEMENTS", 2**28 if gathered else 0)
    for module in (graphs, graphed_drafts):
        monkeypatch.setattr(module, "replayed", lambda run, *_: run)
    monkeypatch.setattr(graphed_drafts, "_upload", lambda target, values: None)
    with on_fake_device() as (engine, device):
        with device.unwatched():
            state, mtp = engine.new_state(2), MTP(engine, 2, 3)
            for kept in (state, *mtp.depths):
                kept.lengths = [7, 9]
            tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
            drafts = GraphedDrafts(engine, state, mtp, tokens, sampling, 40)
            step = GraphedStep(engine, engine.new_state(2), 40)
            drafts._run()
        drafts._run()
        step(tokens.unsqueeze(1))
        step(tokens.unsqueeze(1))
        with pytest.raises(HostWait):
            drafts([3, 2], torch.zeros(2, 7, device="cpu"))


def test_passes_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for no pass either, with rows of different lengths: prefill, drafts, rollback."""
    monkeypatch.setattr(moe, "GATHERED_ELEMENTS", 0)
    with on_fake_device() as (engine, device):
        with device.unwatched():
            state, mtp = engine.new_state(2), MTP(engine, 2, 3)
        read = engine.prefill([[1, 2, 3, 4, 5], list(range(40))], state, chunk=36, on_chunk=mtp.append)
        newest = read.logits.argmax(-1)
        drafted = mtp.draft(newest, lambda logits: logits.argmax(-1))
        tokens = torch.cat((newest.unsqueeze(1), drafted), 1)
        out = engine.forward(tokens, state, counts=[4, 3], rollback=True)
        accept_greedy(out.logits, drafted, batch.on_device([3, 2], DEVICE))
        assert out.rollback is not None
        state.truncate([1, 3], out.rollback)
        mtp.append(tokens[:, :3], out.hidden[:, :3], [1, 3])
        engine.forward(newest.unsqueeze(1), state)


@contextlib.contextmanager
def on_fake_device() -> Iterator[tuple[Engine, Device]]:
    """An engine in BF16 on a CUDA device that is not there."""
    made = {name: t.bfloat16() for name, t in tensors(get("super-tiny")).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "packs", lambda dtype: False)
        weights = read_weights(InMemory(made, Path()), get("super-tiny"))
    _token_ranges.cache_clear()  # copied to the device once a process
    try:
        with torch.inference_mode(), fake_cuda(torch.nn.Module) as (_, device):
            with device.unwatched():
                engine = Engine(on_device(weights, device))
            yield engine, device
    finally:
        _token_ranges.cache_clear()


def on_device(value: Any, device: Device) -> Any:
    """Put the tensors of an engine's weights on the device, in place."""
    if isinstance(value, torch.Tensor):
        return device.like(value)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(x, device) for x in value)
    if type(value).__module__.startswith("megatron_nemotron3.generate"):
        for name, held in vars(value).items():
            object.__setattr__(value, name, on_device(held, device))
    return value
