"""Logits and states do not depend on how a text is split into passes and rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_nemotron3.inference.generate import experts
from megatron_nemotron3.inference.generate.decode import DecodeState
from megatron_nemotron3.inference.generate.engine import EncoderRows, Engine
from megatron_nemotron3.inference.generate.experts import Experts
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.inference.generate.scan import MambaPass, decay_table, short_scan
from megatron_nemotron3.layers.ssd import ssd_reference
from tests.support.engines import NAMES, TOKENS, assert_states_equal, close, repeatable, tiny


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Lengths of passes that add up to at most TOKENS."""
    # Around one token, the short scan, and the chunks of the long one.
    length = st.one_of(st.integers(1, 4), st.integers(30, 35), st.integers(60, 70), st.integers(1, TOKENS))
    passes: list[int] = []
    for n in draw(st.lists(length, min_size=1, max_size=6)):
        if sum(passes) + n <= TOKENS:
            passes.append(n)
    return passes


@repeatable(12)
@given(st.sampled_from(NAMES), cuts())
def test_any_passes_are_one_pass(name: str, passes: list[int]) -> None:
    engine, ids = tiny(name)
    total = sum(passes)
    whole = engine.forward(ids[:, :total], once := engine.new_state(len(ids)))
    state, at = engine.new_state(len(ids)), 0
    for n in passes:
        out = engine.forward(ids[:, at : at + n], state)
        close(out.logits, whole.logits[:, at : at + n])
        at += n
    assert_states_equal(state, once)


@repeatable(12)
@given(st.sampled_from(NAMES), st.lists(st.integers(1, TOKENS), min_size=1, max_size=4), st.integers(1, 200))
def test_a_batch_is_its_rows(name: str, lengths: list[int], chunk: int) -> None:
    engine, ids = tiny(name)
    prompts = [ids[i % len(ids), :n].tolist() for i, n in enumerate(lengths)]
    state = engine.new_state(len(prompts), capacity=8)
    together = engine.prefill(prompts, state, chunk=chunk)
    alone = [engine.new_state(1) for _ in prompts]
    for row, (prompt, single) in enumerate(zip(prompts, alone)):
        out = engine.prefill([prompt], single, chunk=TOKENS)
        close(together.logits[row], out.logits[0])
        close(together.hidden[row], out.hidden[0])
        assert_states_equal(state.select([row]), single)
    # A pass of one token, and one in which rows have different numbers of tokens.
    more = torch.stack([ids[i % len(ids), :3] for i in range(len(prompts))])
    counts = [i % 4 for i in range(len(prompts))]
    first = engine.forward(more[:, :1], state)
    ragged = engine.forward(more, state, counts=counts)
    for row, single in enumerate(alone):
        for out, n in ((first, 1), (ragged, counts[row])):
            if n:
                close(out.hidden[row, :n], engine.forward(more[row : row + 1, :n], single).hidden[0])
        assert_states_equal(state.select([row]), single)


@repeatable(6)
@given(st.integers(1, TOKENS), st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=30, unique=True))
def test_rows_replace_embeddings(chunk: int, positions: list[int]) -> None:
    """Rows that are other tokens' embeddings give what those tokens give, in any order and in any chunks."""
    engine, ids = tiny("nano")
    # Of three rows the second has only tokens, and the third is a shorter text.
    texts = [ids[0].tolist(), ids[1].tolist(), ids[1, : max(positions) + 1].tolist()]
    others = [(7 * at + 3) % engine.config.vocab_size for at in positions]
    rows = EncoderRows(positions, engine.model.embed(torch.tensor(others)))
    meant = [list(text) for text in texts]
    for at, other in zip(positions, others, strict=True):
        meant[0][at] = meant[2][at] = other
    state, expected = engine.new_state(3), engine.new_state(3)
    found = engine.prefill(texts, state, chunk=chunk, rows=[rows, None, rows])
    assert torch.equal(found.logits, engine.prefill(meant, expected, chunk=chunk).logits)
    assert_states_equal(state, expected)


@repeatable(12)
@given(
    st.sampled_from(NAMES),
    st.integers(0, 60),
    st.integers(1, 70),
    st.lists(st.integers(0, 70), min_size=2, max_size=2),
)
def test_rollback_is_a_shorter_pass(name: str, before: int, n: int, keep: list[int]) -> None:
    """Keeping m of n tokens equals a pass of m, for any m, one or one per row; so do later passes."""
    engine, ids = tiny(name)
    n = min(n, TOKENS - before)
    kept = [min(k, n) for k in keep]
    base = engine.new_state(2)
    if before:
        engine.forward(ids[:, :before], base)
    for numbers in (kept, [kept[0]] * 2):
        state = base.select(range(base.batch))
        out = engine.forward(ids[:, before : before + n], state, rollback=True)
        assert out.rollback is not None
        state.truncate(numbers[0] if len(set(numbers)) == 1 else numbers, out.rollback)
        for row, m in enumerate(numbers):
            single = base.select([row])
            if m:
                engine.forward(ids[row : row + 1, before : before + m], single)
            assert_states_equal(state.select([row]), single)
    then = engine.forward(ids[:, :5], state).hidden
    for row in range(2):
        single = base.select([row])
        if kept[0]:
            engine.forward(ids[row : row + 1, before : before + kept[0]], single)
        close(then[row], engine.forward(ids[row : row + 1, :5], single).hidden[0])


@repeatable(20)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_the_short_scan_is_the_recurrence(n: int, seed: int) -> None:
    """With decays of every size, against FP64."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    b, h, p, groups, k = 2, 6, 5, 3, 4
    x, dt = random(b, n, h, p), torch.nn.functional.softplus(3 * random(b, n, h))
    A, D, B, C = -torch.exp(2 * random(h)), random(h), random(b, n, groups, k), random(b, n, groups, k)
    state = random(b, h, p, k)
    scan = MambaPass(random(b, 3 + n, 1), state, dt, decay_table(dt, A), x, B)
    y = short_scan(scan, C, D)
    _, after = scan.after([n] * b)
    wide = [t.double() for t in (x, dt, A, B, C)]
    expected = ssd_reference(*wide, D=D.double(), initial_state=state.double(), return_final_state=True)
    torch.testing.assert_close(y.double(), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.double(), expected[1], rtol=1e-4, atol=1e-4)


def experts_of(name: str) -> tuple[Experts, int]:
    """The experts of the first layer that has some, and how many a token gets."""
    model = tiny(name)[0].model
    return next(iter(model.experts.values())), model.config.moe_router_topk or 0


WAYS = ("_in_place", "_gathered", "_sorted")


@pytest.mark.parametrize("way", WAYS)
def test_implementations_of_experts_agree(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = tiny("super")
    expected = engine.forward(ids, engine.new_state(2)).hidden
    monkeypatch.setattr(Experts, "_implementation", lambda self, *args: getattr(self, way))
    close(engine.forward(ids, engine.new_state(2)).hidden, expected)


def test_many_tokens_in_place_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, topk = experts_of("super")
    made = torch.Generator().manual_seed(0)
    z, weight = torch.randn(37, layer.inner, generator=made), torch.rand(37, topk, generator=made)
    chosen = torch.rand(37, layer.count, generator=made).topk(topk).indices
    whole = layer._in_place(z, chosen, weight)
    close(whole, layer._sorted(z, chosen, weight))
    monkeypatch.setattr(experts, "INDEX_ELEMENTS", 5 * topk * layer.width)
    assert torch.equal(layer._in_place(z, chosen, weight), whole)


def _empty(engine: Engine) -> DecodeState:
    return engine.new_state(2)


def _truncate(engine: Engine, keep: Any, again: bool = False) -> None:
    state = _empty(engine)
    out = engine.forward(torch.zeros(2, 3, dtype=torch.long), state, rollback=True)
    assert out.rollback is not None
    if again:
        engine.forward(torch.zeros(2, 1, dtype=torch.long), state)
    state.truncate(keep, out.rollback)


ERRORS: dict[str, Callable[[Engine], Any]] = {
    r"prompt 1 is empty: give at least one": lambda e: e.prefill([[1], []], _empty(e)),
    r"prompt 0 has token id 2048; super-tiny has the ids 0 to 2047": lambda e: e.prefill(
        [[5, 2048], [1]], _empty(e)
    ),
    r"1 prompts for a state of 2 rows: give one per row": lambda e: e.prefill([[1]], _empty(e)),
    r"row 1 would have 257 tokens, more than max_context=256": lambda e: Engine(e.model).prefill(
        [[1], [1] * 257], _empty(e)
    ),
    r"tokens \(1, 3\) must be \[b, n\] with n > 0 and b=2": lambda e: e.forward(
        torch.zeros(1, 3, dtype=torch.long), _empty(e)
    ),
    r"counts \[4, 1\] for 2 rows: give one per row, from 0 to 3": lambda e: e.forward(
        torch.zeros(2, 3, dtype=torch.long), _empty(e), counts=[4, 1]
    ),
    r"cannot keep \[4, 4\] tokens of a pass with \[3, 3\]": lambda e: _truncate(e, 4),
    r"lengths \[4, 4\], but the pass added \[3, 3\] tokens to \[0, 0\]": lambda e: _truncate(
        e, 1, again=True
    ),
    r"depth 3: there are depths 1 to 2": lambda e: MTP(e).forward(
        3, torch.zeros(1, 1, 128), torch.zeros(1, 1, dtype=torch.long)
    ),
    r"rollback=True with 129 tokens: a pass that can be rolled back has at most 128": lambda e: e.forward(
        torch.zeros(2, 129, dtype=torch.long), _empty(e), rollback=True
    ),
    r"rows for 1 of 2 prompts: give an entry for each": lambda e: e.prefill(
        [[1], [1]], _empty(e), rows=[EncoderRows([0], torch.zeros(1, 128))]
    ),
    r"prompt 1 has 1 rows for 2 positions in its 2 tokens": lambda e: e.prefill(
        [[1], [1, 1]], _empty(e), rows=[None, EncoderRows([0, 1], torch.zeros(1, 128))]
    ),
    r"prompt 1 has token id 5, which stands for a row of an encoder, without the row": lambda e: Engine(
        e.model, media=[5]
    ).prefill([[5], [1, 5]], _empty(e), rows=[EncoderRows([0], torch.zeros(1, 128)), None]),
    r"draft=1: MTP does not see the rows of encoders": lambda e: generate(
        e, [[1]], GenerationOptions(1, draft=1), rows=[EncoderRows([0], torch.zeros(1, 128))]
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ERRORS[message](tiny("super")[0])


def test_the_limit_is_not_reached_by_padding() -> None:
    """Only tokens count towards the context, not the padding of a chunk."""
    engine = Engine(tiny("super")[0].model, max_context=10)
    state = engine.new_state(2)
    engine.prefill([[1] * 10, [1] * 3], state, chunk=4)
    assert state.lengths == [10, 3]


def test_a_model_without_mtp_says_so() -> None:
    with pytest.raises(ValueError, match="nano-tiny has no MTP block"):
        MTP(tiny("nano")[0])
    assert tiny("nano")[0].model.blocks == []
