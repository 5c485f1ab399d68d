"""The MTP block depth by depth: final tokens in chunks of any length, drafts that leave no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.mtp import MTP
from megatron_nemotron3.models import get
from tests.support.engines import ROWS, TOKENS, assert_mtp_equal, close, engine_of, repeatable, text, tiny

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


@repeatable(10)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=3), st.integers(1, 50))
def test_a_ragged_prefill_is_its_rows(lengths: list[int], chunk: int) -> None:
    engine, ids = tiny("super")
    prompts = [ids[i % ROWS, :n].tolist() for i, n in enumerate(lengths)]
    together = MTP(engine, len(prompts), DEPTHS)
    engine.prefill(prompts, engine.new_state(len(prompts)), chunk=chunk, on_chunk=together.append)
    assert together.lengths == lengths
    drafted = together.draft(torch.arange(len(prompts)), lambda x: x.argmax(-1))
    for row, prompt in enumerate(prompts):
        alone = MTP(engine, 1, DEPTHS)
        engine.prefill([prompt], engine.new_state(1), on_chunk=alone.append)
        assert_mtp_equal(together.select([row]), alone)
        for depth in range(min(len(prompt), DEPTHS)):
            close(together.pending[depth][row], alone.pending[depth][0])
        assert drafted[row].tolist() == alone.draft(torch.tensor([row]), lambda x: x.argmax(-1))[0].tolist()


@pytest.mark.parametrize("pattern", ["*E", "*EM-"])
def test_drafts_are_those_of_the_whole_text(pattern: str) -> None:
    """Depth k of the text with the previous drafts appended; Mamba-2 layers in a block roll back, too."""
    config = get("super-tiny").but(mtp_pattern=pattern, dense_ffn_hidden_size=64)
    engine = engine_of(config, seed=1)
    ids = text(engine, 1, 30)
    state = MTP(engine, 1, DEPTHS)
    engine.prefill(ids, engine.new_state(1), chunk=11, on_chunk=state.append)
    before = state.copy()
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
    assert len(engine.weights.mtp) == 2
    state = MTP(engine, 1)
    assert state.blocks[0] is not state.blocks[1]
    with pytest.raises(ValueError, match="depths=3, but super-tiny has 2 MTP blocks"):
        MTP(engine, depths=3)
