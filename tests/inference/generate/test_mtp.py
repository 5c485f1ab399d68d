"""The MTP block depth by depth: final tokens in chunks of any length, drafts that leave no trace."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.models import get
from tests.support.engines import (
    ROWS,
    TOKENS,
    assert_mtp_equal,
    close,
    engine_of,
    repeatable,
    text,
    tiny,
)

DEPTHS = 4


def by_depth(engine: Engine, ids: Tensor, depths: int) -> tuple[MTP, list[Tensor]]:
    """A whole text, depth by depth as in training: the states, and h_0 … h_depths of every position."""
    hidden = [engine.forward(ids, engine.new_state(len(ids))).hidden]
    state = MTP(engine, len(ids), depths)
    for depth in range(1, depths + 1):
        count = ids.shape[1] - depth
        out = state.forward(depth, hidden[-1][:, :count], ids[:, depth:])
        hidden.append(out.hidden)
    return state, hidden


@repeatable(10)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_final_tokens_in_any_chunks(pieces: list[int]) -> None:
    engine, ids = tiny("super")
    total = min(sum(pieces), TOKENS)
    hidden = engine.forward(ids, engine.new_state(ROWS)).hidden
    state, at = MTP(engine, ROWS, DEPTHS), 0
    for n in pieces:
        stop = min(at + n, total)
        if stop > at:
            state.append(ids[:, at:stop], hidden[:, at:stop])
        at = stop
    assert state.lengths == [total] * ROWS
    if total > DEPTHS:
        expected, steps = by_depth(engine, ids[:, :total], DEPTHS)
        assert_mtp_equal(state, expected)
        for depth in range(1, DEPTHS + 1):
            close(state.pending[depth - 1], steps[depth - 1][:, total - depth])


@pytest.mark.parametrize("pattern", ["*E", "*EM-"])
def test_drafts_are_those_of_the_whole_text(pattern: str) -> None:
    """Depth k of the text with the previous drafts appended; Mamba-2 layers in a block roll back, too."""
    config = get("super-tiny").but(mtp_pattern=pattern, dense_ffn_hidden_size=64)
    engine = engine_of(config, seed=1)
    ids = text(engine, 1, 30)
    state = MTP(engine, 1, DEPTHS)
    engine.prefill(ids, engine.new_state(1), chunk=11, on_chunk=state.append)
    before = state.select(range(len(state.lengths)))
    newest = torch.tensor([3])
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        seen.append(logits)
        return logits.argmax(-1)

    drafted = state.draft(newest, choose)
    assert drafted.shape == (1, DEPTHS) and state.lengths == before.lengths
    assert_mtp_equal(state, before)
    # h_k of position 29 has seen the tokens up to 29 + k, the last k - 1 of them drafts.
    longer = torch.cat([ids, newest[None], drafted], 1)
    hidden = engine.forward(ids, engine.new_state(1)).hidden
    again = MTP(engine, 1, DEPTHS)
    for depth in range(1, DEPTHS + 1):
        out = again.forward(depth, hidden, longer[:, depth : 30 + depth])
        hidden = out.hidden
        close(seen[depth - 1], out.logits[:, -1])
    # The text continues after a draft as without one.
    for one in (state, before):
        more = engine.forward(ids, engine.new_state(1)).hidden[:, :3]
        one.append(ids[:, :3], more)
    assert_mtp_equal(state, before)


#: What happens to a text, with numbers: tokens are appended, drafted after, or the states are read.
ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 12), st.integers(0, 12)),
    st.tuples(st.just("draft and append"), st.integers(1, DEPTHS), st.integers(1, 12)),
    st.tuples(st.just("draft and append others"), st.integers(1, DEPTHS), st.integers(1, 12)),
    st.tuples(st.just("draft"), st.integers(1, DEPTHS), st.just(0)),
    st.tuples(st.just("read"), st.just(0), st.just(0)),
    st.tuples(st.just("select"), st.just(0), st.just(0)),
)


@repeatable(20)
@given(st.sampled_from(["*E", "*EM-"]), st.lists(ACTIONS, min_size=1, max_size=8))
def test_what_is_put_off_changes_nothing(pattern: str, actions: list[tuple[str, int, int]]) -> None:
    """Tokens left to the next draft, and drafts that go on, against states that are finished every time."""
    engine, ids, hidden = _text_and_hidden(pattern)
    lazy, eager, at = MTP(engine, ROWS, DEPTHS), MTP(engine, ROWS, DEPTHS), [0] * ROWS

    def rows(counts: list[int]) -> tuple[Tensor, Tensor]:
        picked = [list(range(a, a + max(counts))) for a in at]
        tokens, states = ([x[row, p] for row, p in enumerate(picked)] for x in (ids, hidden))
        return torch.stack(tokens), torch.stack(states)

    def both(counts: list[int], shift: int = 0) -> None:
        if max(map(sum, zip(at, counts, strict=True))) + 12 <= TOKENS:
            tokens, states = rows(counts)
            tokens = (tokens + shift) % engine.config.vocab_size
            for one in (lazy, eager):
                one.append(tokens, states, counts)
            assert_mtp_equal(eager, eager)  # reads it
            at[:] = [a + c for a, c in zip(at, counts, strict=True)]

    def draft(count: int) -> None:
        if min(at):
            newest = torch.stack([ids[row, a] for row, a in enumerate(at)])
            found = [one.draft(newest, lambda x: x.argmax(-1), count).tolist() for one in (lazy, eager)]
            assert found[0] == found[1]
            assert_mtp_equal(eager, eager)

    for what, first, second in actions:
        if what.startswith("draft"):
            draft(first)
        if what == "append":
            both([first, second])
        elif what.startswith("draft and"):
            both([second, max(1, second - first)], shift=1 if what.endswith("others") else 0)
        elif what == "read":
            assert_mtp_equal(lazy, eager)
        elif what == "select":
            lazy = lazy.select(range(len(lazy.lengths)))
    assert lazy.lengths == eager.lengths == at
    assert_mtp_equal(lazy, eager)
    for depth, (mine, other) in enumerate(zip(lazy.pending, eager.pending, strict=True), 1):
        known = [row for row, length in enumerate(at) if length >= depth]
        close(mine[known], other[known])


@functools.cache
def _text_and_hidden(pattern: str) -> tuple[Engine, Tensor, Tensor]:
    config = get("super-tiny").but(mtp_pattern=pattern, dense_ffn_hidden_size=64)
    engine = engine_of(config, seed=1)
    ids = text(engine, ROWS, TOKENS)
    return engine, ids, engine.forward(ids, engine.new_state(ROWS)).hidden


def test_drafting_needs_a_text_and_depths() -> None:
    engine, _ = tiny("super")
    with pytest.raises(ValueError, match=r"cannot draft 2 tokens after \[0\] with 2 depths"):
        MTP(engine, 1).draft(torch.tensor([1]), lambda x: x.argmax(-1))
    state = MTP(engine, 1)
    engine.prefill([[1, 2]], engine.new_state(1), on_chunk=state.append)
    with pytest.raises(ValueError, match="cannot draft 3 tokens"):
        state.draft(torch.tensor([1]), lambda x: x.argmax(-1), count=3)


def test_one_block_per_depth() -> None:
    config = get("super-tiny").but(mtp_use_repeated_layer=False)
    engine = engine_of(config, seed=2)
    assert len(engine.model.blocks) == 2
    first, second = MTP(engine, 1).depths
    assert first.layers.keys().isdisjoint(second.layers)
    with pytest.raises(ValueError, match="depths=3, but super-tiny has 2 MTP blocks"):
        MTP(engine, depths=3)
