"""Who is blamed where nobody, or both, are wrong; and what is said where less is known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.bisect import hypotheses
from megatron_nemotron3.bisect.causes import Cause, Context, shard_order, step, table
from megatron_nemotron3.bisect.diagnose import Diagnosis, Investigation
from megatron_nemotron3.bisect.recording import Recording
from tests.bisect import faults
from tests.bisect.systems import MODEL, Engine, Scored, Weights, checkpoint, healthy_engine, tokens

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
def test_nobody_is_blamed(trainer: torch.dtype, engine: torch.dtype, hidden: bool) -> None:
    """Prefill against decoding, in types of which one rounds 30,000 times as much."""
    sides = healthy_engine(trainer), healthy_engine(engine, decode=True)
    found = compare(recorded(sides[0], trainer, hidden), recorded(sides[1], engine, hidden))
    assert found.blamed == [] and found.exit_status == 0
    assert "neither deviates" in found.lines()[-1]


def _opened(folder: Path, weights: Weights) -> Investigation:
    return Investigation(faults.opened(folder / "hf", weights), None, [])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 8))
def test_nobody_is_blamed_with_other_weights(tmp_path: Path, seed: int) -> None:
    weights = checkpoint(seed)
    by = _opened(tmp_path, weights)
    for dtype in (FP32, BF16):
        sides = [
            tuple(Engine(weights, dtype, decode).score(*one) for one in tokens()) for decode in (False, True)
        ]
        assert compare(recorded(sides[0], dtype), recorded(sides[1], dtype), by).blamed == []


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
        assert found.blamed == []


def test_both_deviate() -> None:
    engine = Engine(checkpoint(5))
    other = recorded(tuple(engine.score(*one) for one in tokens()), FP32, False)
    found = compare(other, other)
    assert found.blamed == ["trainer", "engine"] and found.exit_status == 1
    assert "both deviate" in found.lines()[-1] and "unknown cause" in "\n".join(found.lines())


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
    causes = [cause for cause in table() if cause.kind == "*"]
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


def test_numbers_that_are_none_deviate() -> None:
    broken = [replace(one, logprobs=one.logprobs.clone()) for one in healthy_engine()]
    broken[1].logprobs[60] = torch.nan
    side = plain().side("engine", recorded(tuple(broken), FP32, False))
    assert side.deviates and side.position == (1, 61)


def test_only_a_cause_that_fits_is_named() -> None:
    """A change that does nothing like the fault leaves it unexplained."""
    wrong = [Cause("nothing of the kind", "E", layer=step(shared=lambda shared, *given: 2 * shared(*given)))]
    scored = faults.faulty("scaling factor", FP32)
    side = Investigation(plain().model, None, wrong).side("engine", recorded(scored, FP32))
    assert side.layer == 1 and side.explanations == []


def test_streams_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for few residual streams, a cause gives the same bits."""
    recording = recorded(healthy_engine(), FP32, False)
    cause = next(cause for cause in table() if cause.name == "no shared expert")
    plenty = Investigation(plain().model, None, []).hypotheses(recording)
    every = len(plenty.plain[0].streams)
    monkeypatch.setattr(hypotheses, "KEPT_BYTES", 1 << 18)
    little = Investigation(plain().model, None, []).hypotheses(recording)
    assert len(little.plain[0].streams) < every == MODEL.num_layers + 1
    pairs = zip(little.logprobs(cause, (4,)) or [], plenty.logprobs(cause, (4,)) or [], strict=True)
    assert [torch.equal(a, b) for a, b in pairs] == [True, True]


def test_causes_have_names_of_their_own() -> None:
    causes = table()
    assert len({cause.name for cause in causes}) == len(causes) > 150
    assert {cause.kind for cause in causes} >= set("ME*")


def test_causes_that_cannot_be_are_left_out() -> None:
    """Shards that do not fit, a state after no prompt, a latent projection of a layer that is not there."""
    assert shard_order(10, 4, "reversed") is None
    places = shard_order(8, 4, "neighbours swapped")
    assert places is not None and places.tolist() == [2, 3, 0, 1, 6, 7, 4, 5]
    made = {c.name: c.layer(Context(MODEL, 0, 1)) for c in table() if c.layer is not None}
    assert made["a convolution state empty after the prompt"] is None
    assert made["the latent projections of the previous layer of experts"] is None
    assert made["the latent projections of the next layer of experts"] is not None
