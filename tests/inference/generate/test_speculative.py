"""Drafting changes only the speed: greedy texts, distributions of sampled texts, states."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_nemotron3.inference.generate import prompts as generate_module
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.inference.generate.prompts import (
    Continuation,
    Decoder,
    GenerationOptions,
    Speculation,
    generate,
)
from megatron_nemotron3.inference.generate.sampling import Sampling, accept, draw, probabilities
from megatron_nemotron3.models import get
from tests.support.engines import (
    MARGIN,
    agreeing,
    agreeing_small,
    assert_mtp_equal,
    assert_states_equal,
    close,
    engine_of,
    repeatable,
    routing_margin,
    tiny,
)
from tests.support.naive_decoding import naive_continuation

#: Two logits closer than this may be swapped between a pass over one token and one over several.
GAP = 1e-3
#: Probability over seeds that a correct sampler fails a statistical test; the seed is fixed.
FALSE_ALARMS = 1e-6


def clear(engine: Engine, prompt: list[int], new: list[int]) -> bool:
    """Whether no token or expert was chosen by a small margin."""
    ids = torch.tensor([prompt + new])
    logits = engine.forward(ids, engine.new_state(1)).logits
    best = logits[0, len(prompt) - 1 : -1].topk(2, -1).values
    return bool((best[:, 0] - best[:, 1]).min() > GAP) and routing_margin(engine, ids) > MARGIN


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(2048, (n,), generator=made).tolist() for n in lengths]


# --- greedy -------------------------------------------------------------------------------------------


@repeatable(10)
@given(
    strength=st.sampled_from([0.0, 0.03, 1.0]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    draft=st.integers(1, 7),
    new=st.integers(1, 17),
    seed=st.integers(0, 50),
    stops=st.lists(st.integers(0, 40), max_size=2),
)
def test_greedy_texts_are_those_of_naive_decoding(
    strength: float, lengths: list[int], draft: int, new: int, seed: int, stops: list[int]
) -> None:
    engine = tiny("super")[0] if strength == 1.0 else agreeing(strength)
    ids = prompts(lengths, seed)
    free = [naive_continuation(engine, prompt, new) for prompt in ids]
    for prompt, tokens in zip(ids, free, strict=True):
        assume(clear(engine, prompt, tokens))
    produced = [token for tokens in free for token in tokens]
    ends = {produced[i % len(produced)] for i in stops}
    expected = []
    for tokens in free:
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
        expected.append(Continuation(tokens[:end], stopped=end is not None))
    assert generate(engine, ids, GenerationOptions(new, stop=ends)).rows == expected
    seen: list[list[int]] = [[] for _ in ids]
    found = generate(
        engine,
        ids,
        GenerationOptions(new, draft=draft, stop=ends),
        on_token=lambda row, token: seen[row].append(token),
    )
    assert found.rows == expected and seen == [row.tokens for row in expected]
    assert found.speculation.tokens == found.new_tokens - len(ids)
    assert found.speculation.steps <= found.speculation.tokens


@pytest.mark.parametrize("draft", [0, 7])
def test_the_context_may_be_full(draft: int) -> None:
    """The last tokens reach the limit, and no draft exceeds it."""
    whole = agreeing(0.0)
    engine = Engine(whole.model, max_context=32)
    found = generate(engine, [[1] * 20, [2] * 12], GenerationOptions(12, draft=draft))
    assert found.rows == generate(whole, [[1] * 20, [2] * 12], GenerationOptions(12)).rows
    with pytest.raises(ValueError, match="row 0 would have 33 tokens"):
        generate(engine, [[1] * 21], GenerationOptions(12, draft=draft))


def test_a_callback_ends_its_row() -> None:
    engine = agreeing(0.0)
    free = generate(engine, [[1], [2]], GenerationOptions(12, draft=3)).rows
    count: Counter[int] = Counter()

    def on_token(row: int, token: int) -> bool:
        count[row] += 1
        return row == 1 and count[row] == 6

    found = generate(engine, [[1], [2]], GenerationOptions(12, draft=3), on_token=on_token).rows
    assert found[0].tokens == free[0].tokens and found[1].tokens == free[1].tokens[:6]
    assert count == {0: 12, 1: 6} and not found[1].stopped


def test_what_is_refused() -> None:
    engine = agreeing(0.0)
    with pytest.raises(ValueError, match="draft=-1"):
        generate(engine, [[1]], GenerationOptions(4, draft=-1))
    without = engine_of(get("nano-tiny"))
    with pytest.raises(ValueError, match="no MTP block"):
        generate(without, [[1]], GenerationOptions(4, draft=1))
    assert len(generate(without, [[1]], GenerationOptions(4)).rows[0].tokens) == 4
    apart = engine_of(get("super-tiny").but(mtp_use_repeated_layer=False))
    with pytest.raises(ValueError, match="depths=3, but super-tiny has 2 MTP blocks"):
        generate(apart, [[1]], GenerationOptions(4, draft=3))
    assert (
        generate(apart, [[1]], GenerationOptions(6, draft=2)).rows
        == generate(apart, [[1]], GenerationOptions(6)).rows
    )


# --- states -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=4, seed=2)])
def test_states_are_those_of_the_text(sampling: Sampling) -> None:
    """After every step, with different acceptances and limits per row, states equal those of a prefill."""
    engine = agreeing(0.03)
    rows = prompts([3, 9, 1, 30], seed=1)
    decoder = Decoder(engine, rows, GenerationOptions(64, sampling, draft=4))
    texts = [row + [token] for row, token in zip(rows, decoder.newest.tolist(), strict=True)]
    lengths = set()
    for step in range(6):
        new = decoder.step([4, 2, 4, step % 3])
        assert [len(tokens) <= limit + 1 for tokens, limit in zip(new, [4, 2, 4, step % 3], strict=True)]
        lengths |= {tuple(map(len, new))}
        for row, tokens in enumerate(new):
            texts[row] += tokens
        assert [text[-1] for text in texts] == decoder.newest.tolist()
        state, mtp = engine.new_state(4), MTP(engine, 4, 4)
        engine.prefill([text[:-1] for text in texts], state, on_chunk=mtp.append)
        assert_states_equal(decoder.state, state)
        assert decoder.mtp is not None and decoder.mtp.lengths == mtp.lengths
        assert_mtp_equal(decoder.mtp, mtp)
        for depth, (mine, other) in enumerate(zip(decoder.mtp.pending, mtp.pending, strict=True), 1):
            known = [row for row, text in enumerate(texts) if len(text) - 1 >= depth]
            close(mine[known], other[known])
    assert any(len(set(counts)) > 1 for counts in lengths), "rows never differed"


# --- sampling -----------------------------------------------------------------------------------------


def p_value(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """p-value of Pearson's chi-square test; outcomes expected fewer than 10 times are combined."""
    total = sum(observed.values())
    assert set(observed) <= {outcome for outcome, share in expected.items() if share > 0}
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for outcome, share in expected.items():
        if share * total < 10:
            rare = [rare[0] + observed[outcome], rare[1] + share * total]
        else:
            cells.append((observed[outcome], share * total))
    if rare[1] >= 10:
        cells.append((rare[0], rare[1]))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def exact(engine: Engine, prompt: list[int], new: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every continuation under plain sampling."""
    texts = list(itertools.product(range(engine.config.vocab_size), repeat=new))
    ids = torch.tensor([[*prompt, *text] for text in texts])
    logits = engine.forward(ids, engine.new_state(len(ids))).logits
    p = probabilities(logits[:, len(prompt) - 1 : -1], sampling).double()
    shares = p.gather(-1, ids[:, len(prompt) :].unsqueeze(-1)).squeeze(-1).prod(-1)
    return dict(zip(texts, shares.tolist(), strict=True))


#: Row i uses seed + i, so the seeds are far apart.
SAMPLINGS = (
    Sampling(1.0, seed=100_000),
    Sampling(0.6, top_k=5, seed=200_000),
    Sampling(1.3, top_p=0.8, seed=300_000),
    Sampling(1.0, top_k=8, top_p=0.9, seed=400_000),
)


def drawn(sampling: Sampling, rows: int = 3000) -> float:
    """p-value of continuations by four tokens with two drafts; every row has its own seed.

    The prefill gives the first token, the first verification up to three more. Of tokens 2 and 3, and of 3
    and 4; twice the smaller one (Bonferroni).
    """
    engine, prompt = agreeing_small(0.5), [1, 2, 3]
    found = generate(engine, [prompt] * rows, GenerationOptions(4, draft=2, sampling=sampling))
    texts = exact(engine, prompt, 4, sampling)
    values = []
    for pair in (slice(1, 3), slice(2, 4)):
        expected: dict[tuple[int, ...], float] = {}
        for text, share in texts.items():
            expected[text[pair]] = expected.get(text[pair], 0.0) + share
        values.append(p_value(Counter(tuple(row.tokens[pair]) for row in found.rows), expected))
    assert found.speculation.accepted[1] > rows / 20
    return 2 * min(values)


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(s, marks=pytest.mark.full if s in SAMPLINGS[:3] else (), id=str(s)) for s in SAMPLINGS],
)
def test_sampled_texts_have_the_distribution_of_plain_sampling(sampling: Sampling) -> None:
    assert drawn(sampling) > FALSE_ALARMS


def _always(*given: Tensor) -> tuple[Tensor, Tensor]:
    *rest, a, d = given
    return accept(*rest, torch.zeros_like(a), d)


def _resample_from_p(p: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    accepted, _ = accept(p, *rest)
    return accepted, draw(p[torch.arange(len(p)), accepted], rest[-1])


def _the_same_number_twice(*given: Tensor) -> tuple[Tensor, Tensor]:
    *rest, a, d = given
    return accept(*rest, a, a[:, 0] if a.shape[1] else d)


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=pytest.mark.full) for m in (_always, _the_same_number_twice)] + [_resample_from_p],
)
def test_wrong_rules_are_noticed(mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "accept", mutant)
    assert drawn(SAMPLINGS[0]) < FALSE_ALARMS


@repeatable(20)
@given(st.integers(0, 10**6), st.floats(0.1, 3.0), st.booleans())
def test_one_draft_exactly(seed: int, spread: float, sparse: bool) -> None:
    """The distribution of the first token, summed over a grid of random numbers instead of drawing them."""
    made, grid = torch.Generator().manual_seed(seed), 150
    p, q = (torch.randn(2, 5, generator=made) * spread).softmax(-1)
    if sparse:  # as top_k leaves them: tokens that only one side can give
        p[0], q[1] = 0, 0
        p, q = p / p.sum(), q / q.sum()
    ticks = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    u, v = (axis.flatten() for axis in torch.meshgrid(ticks, ticks, indexing="ij"))
    found = torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        n = len(u)
        drafted = torch.full((n, 1), token)
        accepted, own = accept(
            p.expand(n, 2, 5), q.expand(n, 1, 5), drafted, torch.ones(n, dtype=torch.long), u[:, None], v
        )
        first = torch.where(accepted > 0, drafted[:, 0], own)
        found += float(q[token]) * torch.bincount(first, minlength=5) / n
    # Each decision boundary lies between two grid points.
    torch.testing.assert_close(found, p.double(), rtol=0, atol=2.0 / grid)


@pytest.mark.parametrize("draft", [1, 4])
def test_a_row_does_not_depend_on_its_neighbors(draft: int) -> None:
    engine, ids = agreeing(0.03), prompts([4, 11, 2], seed=3)
    together = generate(
        engine, ids, GenerationOptions(14, draft=draft, sampling=Sampling(0.8, top_k=6, seed=20))
    )
    for row, prompt in enumerate(ids):
        alone = generate(
            engine,
            [prompt],
            GenerationOptions(14, draft=draft, sampling=Sampling(0.8, top_k=6, seed=20 + row)),
        )
        assert alone.rows[0].tokens == together.rows[row].tokens


# --- accounting ---------------------------------------------------------------------------------------


def test_every_draft_is_accepted_where_mtp_is_the_model() -> None:
    """12 tokens: the prefill's, two verifications of 5, and one with a limit of 0."""
    found = generate(agreeing(0.0), [[1]], GenerationOptions(12, draft=4))
    s = found.speculation
    assert (s.steps, s.tokens, s.drafted, s.accepted) == (3, 11, [2, 2, 2, 2], [2, 2, 2, 2])
    assert s.acceptance_length == pytest.approx(11 / 3) and s.by_position == [1.0] * 4
    assert found.passes == 3 and found.new_tokens == 12


def test_a_draft_that_ends_the_row_ends_the_count() -> None:
    """The third token after the prefill's is a stop token: later drafts are not counted."""
    engine = agreeing(0.0)
    free = generate(engine, [[1]], GenerationOptions(8, draft=4)).rows[0].tokens
    assert len(set(free[:4])) == 4
    found = generate(engine, [[1]], GenerationOptions(8, draft=4, stop=[free[3]]))
    s = found.speculation
    assert found.rows[0].tokens == free[:4] and found.rows[0].stopped
    assert (s.steps, s.tokens, s.drafted, s.accepted) == (1, 3, [1, 1, 1, 0], [1, 1, 1, 0])
    assert s.by_position == [1.0, 1.0, 1.0, None]


def test_counts_of_a_batch_are_those_of_its_rows() -> None:
    engine, ids = agreeing(0.03), prompts([4, 11, 2], seed=3)
    together = generate(engine, ids, GenerationOptions(14, draft=3)).speculation
    alone = [generate(engine, [prompt], GenerationOptions(14, draft=3)).speculation for prompt in ids]
    assert together.steps == sum(s.steps for s in alone) and together.tokens == 39
    assert together.accepted == [sum(s.accepted[i] for s in alone) for i in range(3)]
    assert together.drafted == [sum(s.drafted[i] for s in alone) for i in range(3)]
    assert 1.2 < together.acceptance_length < 4
    assert Speculation(2).acceptance_length == 0.0
