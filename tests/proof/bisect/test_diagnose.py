"""Which side is reported where none, or both, are wrong; and what is printed where less is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.proof.bisect import hypotheses
from megatron_nemotron3.proof.bisect.causes import Context
from megatron_nemotron3.proof.bisect.changes import placed
from megatron_nemotron3.proof.bisect.diagnose import Diagnosis, Investigation, cause_table
from megatron_nemotron3.proof.bisect.recording import Recording
from tests.proof.bisect import damage as d
from tests.proof.bisect import faults
from tests.proof.bisect.fault_list import FAULTS
from tests.proof.bisect.systems import MODEL, Engine, Scored, Weights, checkpoint, healthy_engine, tokens

FP32, BF16 = torch.float32, torch.bfloat16


_OTHER_PAIRS = [(FP32, FP32), (BF16, FP32), (BF16, BF16)]


@cache
def plain() -> Investigation:
    """Without causes: whether a side deviates does not depend on them."""
    return Investigation(faults.investigation().model, None, [])


def recorded(scored: tuple[Scored, ...], dtype: torch.dtype, hidden: bool = True) -> Recording:
    return faults.recording(scored, "system", dtype, hidden)


def compare(trainer: Recording, engine: Recording, by: Investigation | None = None) -> Diagnosis:
    return (by or plain()).compare(trainer, engine)


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(
    ("trainer", "engine"), [(FP32, BF16), *(pytest.param(*p, marks=pytest.mark.full) for p in _OTHER_PAIRS)]
)
def test_no_side_deviates(trainer: torch.dtype, engine: torch.dtype, hidden: bool) -> None:
    """Prefill against decoding, in types of which one rounds 30,000 times as much."""
    sides = healthy_engine(trainer), healthy_engine(engine, decode=True)
    found = compare(recorded(sides[0], trainer, hidden), recorded(sides[1], engine, hidden))
    assert found.deviating == [] and found.exit_status == 0
    assert "neither deviates" in found.lines()[-1]


def _opened(folder: Path, weights: Weights) -> Investigation:
    return Investigation(faults.opened(folder / "hf", weights), None, [])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 8))
def test_no_side_deviates_with_other_weights(tmp_path: Path, seed: int) -> None:
    weights = checkpoint(seed)
    by = _opened(tmp_path, weights)
    for dtype in (FP32, BF16):
        sides = [
            tuple(Engine(weights, dtype, decode).score(*one) for one in tokens()) for decode in (False, True)
        ]
        assert compare(recorded(sides[0], dtype), recorded(sides[1], dtype), by).deviating == []


def _with_ties(favour: float = 0.0) -> Weights:
    """Expert 5 of every router has the scores of expert 3, but for a difference that rounding decides."""
    weights = checkpoint()
    for name in weights:
        if name.endswith(("gate.weight", "correction_bias")):
            weights[name][5] = weights[name][3]
            if name.endswith("correction_bias"):
                weights[name][5] += favour
    return weights


@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.full)])
def test_ties_blame_nobody(tmp_path: Path, dtype: torch.dtype) -> None:
    """Both systems decide near ties of routers in their own way, and their log-probabilities differ."""
    engines = [Engine(_with_ties(favour), dtype) for favour in (4e-7, -4e-7)]
    sides = [tuple(engine.score(*one) for one in tokens()) for engine in engines]
    other = [
        (a.routing[layer].sort(-1).values != b.routing[layer].sort(-1).values).any()
        for a, b in zip(*sides, strict=True)
        for layer in a.routing
    ]
    assert any(other)
    for hidden in (False, True):
        found = compare(
            *(recorded(side, dtype, hidden) for side in sides), _opened(tmp_path / str(hidden), _with_ties())
        )
        assert found.deviating == []


def test_both_deviate() -> None:
    engine = Engine(checkpoint(5))
    other = recorded(tuple(engine.score(*one) for one in tokens()), FP32, False)
    found = compare(other, other)
    assert found.deviating == ["trainer", "engine"] and found.exit_status == 1
    assert "both deviate" in found.lines()[-1] and "no cause was tried" in "\n".join(found.lines())


def _noisy(layer: int) -> tuple[Scored, ...]:
    """A layer's output is disturbed from token 150 on, in a way that is in no table."""
    engine = Engine(checkpoint())

    def disturbed(module: Any, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 150:] += 0.1 * torch.randn(out[:, 150:].shape, generator=torch.Generator().manual_seed(0))
        return out

    engine.layers[layer].register_forward_hook(disturbed)
    return tuple(engine.score(*one) for one in tokens())


def test_unknown_cause_is_not_guessed() -> None:
    """The layer and the token are found, and no cause of attention is named."""
    causes = [cause for cause in cause_table(MODEL) if cause.kind == "*"]
    side = Investigation(plain().model, None, causes).side("engine", recorded(_noisy(3), FP32))
    assert side.deviates and side.exactly and side.layer == 3
    assert side.position == (0, 150) and side.cause is None


def test_few_hidden_states_bound_the_layer() -> None:
    recording = recorded(_noisy(3), FP32)
    for one in recording.sequences:
        one.hidden = {n: x for n, x in one.hidden.items() if n in (1, 4, 7)}
        one.routing = {}
    side = plain().side("engine", recording)
    assert side.deviates and not side.exactly and side.layer is None


def test_router_choices_bound_the_layer() -> None:
    recording = recorded(_noisy(3), FP32)
    for one in recording.sequences:
        one.hidden = {}
    assert plain().side("engine", recording).routed == 4


def test_streams_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for few residual streams, a cause gives the same."""
    recording = recorded(healthy_engine(), FP32, False)
    cause = next(cause for cause in cause_table(MODEL) if cause.name == "no shared expert")
    plenty = Investigation(plain().model, None, []).hypotheses(recording)
    every = len(plenty.plain[0].streams)
    monkeypatch.setattr(hypotheses, "KEPT_BYTES", 1 << 18)
    little = Investigation(plain().model, None, []).hypotheses(recording)
    assert len(little.plain[0].streams) < every == MODEL.num_layers + 1
    for few, all_of_them in zip(little.plain, plenty.plain, strict=True):
        assert all(torch.equal(x, all_of_them.streams[layer]) for layer, x in few.streams.items())
    found, expected = little.logprobs(cause, (4,)), plenty.logprobs(cause, (4,))
    assert found is not None and expected is not None and len(found) == 2
    # Layer 3, computed for both sequences before, is computed for one again: products of fewer rows may round
    # otherwise (2e-6 here; the cause moves a log-probability by 1.4).
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_causes_that_cannot_be_are_left_out() -> None:
    """Shards that do not fit, a state after no prompt, a latent projection of a layer that is not there."""
    swapped, given = lambda s: s[[1, 0, 3, 2]], torch.arange(10)
    assert torch.equal(placed(swapped, 4, 0, given), given)
    assert placed(swapped, 4, 0, torch.arange(8)).tolist() == [2, 3, 0, 1, 6, 7, 4, 5]
    made = {c.name: c.layer(Context(MODEL, 0, 1)) for c in cause_table(MODEL) if c.layer is not None}
    assert made["later keys before the prompt's end, too"] is None
    assert made["fc1_latent of the previous layer of its kind"] is None
    assert made["fc1_latent of the next layer of its kind"] is not None


def _damaged(weights: Weights | None = None, *changes: Callable[[Engine], None]) -> Recording:
    """An engine with hidden states and router choices."""
    engine = Engine(checkpoint() if weights is None else weights)
    for change in changes:
        change(engine)
    return recorded(tuple(engine.score(*one) for one in tokens()), FP32)


def _among(*words: str) -> Investigation:
    """With the causes that have one of these words, and the checkpoint before this one."""
    causes = [cause for cause in cause_table(MODEL) if any(word in cause.name for word in words)]
    return Investigation(plain().model, faults.investigation().previous, causes)


def test_a_second_fault_is_not_hidden_by_the_first() -> None:
    changes = FAULTS["norm over all groups"].engine, FAULTS["scaling factor"].engine
    assert all(changes)
    by = _among("one group in the norm", "a routed scaling factor")
    side = by.side("engine", _damaged(None, *(one for one in changes if one)))
    assert side.cause == "one group in the norm after the scan" and side.rest > 1000
    alone = by.side("engine", _damaged(None, *(one for one in changes[:1] if one)))
    assert alone.cause == side.cause and not alone.rest


def test_experts_that_deviate_are_seen_in_the_tokens() -> None:
    swapped = d.experts(lambda e: {2: 3, 3: 2}.get(e, e), "4")(checkpoint())
    side = _among().side("engine", _damaged(swapped))
    assert side.experts == (2, 3) and side.cause == "experts 2 and 3 swapped" and side.layer == 4
    stale = d.stale(r"backbone\.layers\.4\.mixer\.experts\.7\.")(checkpoint())
    side = _among().side("engine", _damaged(stale))
    assert side.experts == (7,) and side.cause == "routed expert 7 of the previous checkpoint"


def test_a_single_stale_tensor_is_named() -> None:
    side = _among().side("engine", _damaged(d.stale(r"backbone\.layers\.5\.mixer\.out_proj")(checkpoint())))
    assert side.cause == "out_proj of the previous checkpoint" and side.layer == 5


def test_negative_time_steps_are_recomputed(tmp_path: Path) -> None:
    """Without softplus states may grow; the fast scan is for states that decay."""
    weights = d.changed("A_log", lambda w: torch.full_like(w, -3.0))(checkpoint())
    weights = d.changed("dt_bias", lambda w: torch.full_like(w, 0.3))(weights)
    causes = [cause for cause in cause_table(MODEL) if "softplus" in cause.name]
    by = Investigation(faults.opened(tmp_path / "hf", weights), None, causes)
    raw = d.scan(dt_softplus=False, dt_limit=(-torch.inf, torch.inf))
    recording = _damaged(weights, raw)
    side = by.side("engine", recording)
    assert side.cause == "no softplus in the time steps" and side.layer == 0 and not side.rest
    recording.sequences = [replace(one, hidden={}, routing={}) for one in recording.sequences]
    assert by.side("engine", recording).cause == "no softplus in the time steps"


def test_what_enters_the_first_layer_is_not_called_its_fault() -> None:
    rows = d.changed("embeddings", lambda w: torch.cat([w[:100], w[100:].flip(0)]))(checkpoint())
    found = compare(recorded(healthy_engine(), FP32), _damaged(rows), _among("no D"))
    assert found.engine.entering and found.engine.cause is None
    assert "layer 0 (Mamba), or the tokens and embeddings that enter it" in "\n".join(found.lines())


@pytest.mark.parametrize(("width", "inside"), [(64, 1), (4096, 2)])
def test_small_layers_run_in_one_thread(monkeypatch: pytest.MonkeyPatch, width: int, inside: int) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    by = Investigation(plain().model, None, [])
    monkeypatch.setattr(by.model, "config", by.model.config.but(hidden_size=width))
    monkeypatch.setattr(by, "side", lambda name, recording: seen.append(torch.get_num_threads()))
    monkeypatch.setattr(by, "hypotheses", lambda recording: by)
    monkeypatch.setattr(by, "prepare", lambda *dtypes: None, raising=False)
    torch.set_num_threads(2)
    try:
        by.compare(*[recorded(healthy_engine(), FP32)] * 2)
        assert seen == [inside, inside] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_window_of_any_size_is_read_from_the_tokens() -> None:
    def window(old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **given: Any) -> Any:
        far = torch.full((q.shape[-2],) * 2, -torch.inf).tril_(-37)
        return old(module, q, k, v, far + mask, **given)

    side = Investigation(plain().model).side("engine", _damaged(None, d.attention(window)))
    assert side.cause == "no keys outside a window of 37 tokens"
