"""A token between two nearly equal experts: rounding chooses, so a comparison with it proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify import compare, proof, script_stage
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState, failed, passed
from megatron_nemotron3.proof.certify.plain_step import Objective, define
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.proof.certify.world import global_batch
from tests.proof.certify.test_script import bench

#: Only what routers choose is used of it.
OBJECTIVE = Objective(
    per_token=False, mtp=0.1, balance=(), z=0.0, bias_rate=1e-3, lr=1e-2, edge_lr=1e-2, betas=(0.9, 0.95),
    epsilon=1e-2, decay=0.1,
)  # fmt: skip
#: A comparison that failed.
APART = Finding("expert biases", PropertyState.FAIL, difference=2.0, tolerance=1.0)
Stage = Callable[[Bench], Iterator[Finding]]


def tied(one: Any, start: Tensors) -> Tensors:
    """The weights with an expert's bias moved so that one token has two experts of the same rank."""
    defined = define(one, OBJECTIVE, start, global_batch(one, 0), {})
    routing = defined.routings[0]
    worst = routing.ranked.gather(-1, routing.chosen).amin(-1)
    best, expert = routing.ranked.scatter(-1, routing.chosen, -torch.inf).max(-1)
    nearest = (worst - best).flatten().argmin()
    key = f"{routing.layer}mlp.router.expert_bias"
    bias = start[key].clone()
    bias[expert.flatten()[nearest]] += (worst - best).flatten()[nearest]
    return {**start, key: bias}


@pytest.fixture
def small(tmp_path: Path) -> Bench:
    return bench(tmp_path, ParallelLayout(dp=2, ep=2), pattern="ME")


@pytest.mark.full
def test_a_tie_is_seen_and_other_tokens_prove(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    one = small.case(None)
    start = compare.weights(one)
    assert not compare.depends_on_rounding(one)
    with monkeypatch.context() as patch:
        patch.setattr(compare, "weights", lambda case: tied(one, start))
        for cached in (compare._runs, compare.tolerances):
            cached.cache_clear()
        assert compare.depends_on_rounding(one)
        assert not compare.depends_on_rounding(small.case(None, seed=one.seed + 1))
        tried = []
        layouts = proof._layouts

        def wrong_on_the_first(bench: Bench, seed: int) -> Iterator[Finding]:
            tried.append(seed)
            yield from layouts(bench, seed)
            if seed == one.seed:
                yield APART

        patch.setattr(proof, "_layouts", wrong_on_the_first)
        found = list(proof.layouts(small))
    for cached in (compare._runs, compare.tolerances):
        cached.cache_clear()
    assert tried == [one.seed, one.seed + 1] and found
    assert {finding.state for finding in found} == {passed("").state}


STAGES: dict[str, tuple[Any, str, Stage]] = {
    "layouts": (proof, "_layouts", proof.layouts),
    "script": (script_stage, "_script", script_stage.script),
}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("ties", "tries"), [(0, 1), (2, 3), (9, 4)])
def test_a_failure_counts_where_rounding_decides_nothing(
    name: str, ties: int, tries: int, small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault fails on all tokens, so it stays; as many as four are tried."""
    module, attribute, stage = STAGES[name]
    seeds: list[int] = []

    def always_wrong(_: Any, seed: int) -> Iterator[Finding]:
        seeds.append(seed)
        yield APART

    monkeypatch.setattr(module, attribute, always_wrong)
    monkeypatch.setattr(compare, "depends_on_rounding", lambda case: len(seeds) <= ties)
    monkeypatch.setattr(script_stage.ScriptRuns, "depend_on_rounding", lambda runs: len(seeds) <= ties)
    assert list(stage(small)) == [APART]
    assert len(seeds) == tries and seeds == list(range(seeds[0], seeds[0] + tries))


@pytest.mark.parametrize("name", STAGES)
def test_a_run_that_did_not_end_is_not_repeated(
    name: str, small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was compared, and one process that fails cannot be asked whether rounding decides."""
    module, attribute, stage = STAGES[name]
    dead = failed("training", "one process", "it ended")
    monkeypatch.setattr(module, attribute, lambda _, seed: iter([dead, APART]))
    monkeypatch.setattr(compare, "depends_on_rounding", lambda case: pytest.fail("asked"))
    monkeypatch.setattr(script_stage.ScriptRuns, "depend_on_rounding", lambda runs: pytest.fail("asked"))
    assert list(stage(small)) == [dead, APART]


@pytest.mark.full
@pytest.mark.parametrize("tie", [False, True])
def test_the_script_at_a_tie(tie: bool, small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts with the same weights of the router."""
    start = compare.weights(small.case(None, fault=None))
    if tie:
        (router, bias) = ("decoder.layers.1.mlp.router.weight", "decoder.layers.1.mlp.router.expert_bias")
        start = {**start, router: start[router].clone(), bias: start[bias].clone()}
        for key in (router, bias):
            start[key][1] = start[key][0]
    monkeypatch.setattr(script_stage, "weights", lambda case: start)
    runs = script_stage.ScriptRuns(small)
    runs.write_data()
    runs.write_starts()
    runs.bases = [runs.run(f"one-{n}", None, *runs.fresh(n)) for n in range(1 + compare.NUDGES)]
    assert runs.depend_on_rounding() == tie
