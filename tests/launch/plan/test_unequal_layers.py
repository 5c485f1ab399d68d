"""Models whose E layers differ (`moe_layers`): the plan counts each layer with its own sizes."""

from __future__ import annotations

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.plan.activations import layer_activations
from megatron_nemotron3.launch.plan.flops import layer_operations, letter, model_operations, resolve, symbols
from megatron_nemotron3.launch.plan.hardware import GPUS
from megatron_nemotron3.launch.plan.memory import memory
from megatron_nemotron3.launch.plan.state import stage_patterns, state
from megatron_nemotron3.launch.plan.timing import Machine, layer_times, one_replica, step_time
from megatron_nemotron3.launch.plan.traffic import step_traffic
from megatron_nemotron3.models import count, get
from tests.support.exact_state import exact_state, parameters
from tests.support.launches import launch, stage_activations

PUZZLE = get("puzzle")
PLAIN = PUZZLE.but(moe_layers=None)
PIPELINE = ParallelLayout(pp=4, ep=8, dp=8)


def test_a_symbol_stands_for_layers_of_the_same_sizes() -> None:
    found = symbols(PUZZLE)
    assert "".join(map(letter, found)) == PUZZLE.pattern and symbols(PLAIN) == PUZZLE.pattern
    assert len(set(found)) == len(set(PUZZLE.pattern)) - 1 + len(set(PUZZLE.moe_layers or ()))
    for layer, symbol in enumerate(found):
        config, kind = resolve(PUZZLE, symbol)
        if kind == "E":
            assert config == PUZZLE.at(layer)
        else:
            assert config is PUZZLE
    assert resolve(PUZZLE, "E") == (PUZZLE, "E")  # MTP's


def test_stages_have_their_own_layers() -> None:
    stages = stage_patterns(PUZZLE, 4, 8192)
    assert "".join(stages) == symbols(PUZZLE)
    at = launch(PUZZLE, PIPELINE, seq_length=8192, backend="te")
    for stage, pattern in enumerate(stages):
        experts = sum(
            sum(layer_activations(at, symbol).values()) for symbol in pattern if letter(symbol) == "E"
        )
        mtp = PUZZLE.mtp_num_layers * sum(layer_activations(at, "E").values()) if stage == 3 else 0
        assert stage_activations(at, stage)["E"] == experts + mtp
    assert len({stage_activations(at, stage)["E"] for stage in range(3)}) == 3


def test_weights_of_every_stage() -> None:
    whole = launch(PUZZLE, ParallelLayout())
    assert sum(p.elements for p in parameters(whole, 0)) == count(PUZZLE).trainable
    for rank in range(4):
        at = launch(PUZZLE, PIPELINE, precision="bf16")
        exact = exact_state(at, pp_rank=rank)
        assert state(at, rank).weights == pytest.approx(exact.weights, rel=1e-3)


def test_operations_and_traffic_follow_the_layers() -> None:
    experts = next(
        one for one in model_operations(PUZZLE, 8192) if (one.kind, one.module) == ("E", "experts")
    )
    own = [PUZZLE.at(layer) for layer, kind in enumerate(PUZZLE.pattern) if kind == "E"]
    expected = sum(layer_operations(config, "E", 8192)["experts"] for config in own)
    expected += PUZZLE.mtp_num_layers * layer_operations(PUZZLE, "E", 8192)["experts"]
    assert experts.forward == pytest.approx(expected, rel=1e-12)
    assert experts.layers == len(own) + PUZZLE.mtp_num_layers

    sent = {}
    for config in (PUZZLE, PLAIN):
        at = launch(config, ParallelLayout(ep=8, dp=8), seq_length=8192)
        transfers = [t for t in step_traffic(at) if (t.link, t.module) == ("ep", "experts")]
        sent[config] = sum(transfer.buffer for transfer in transfers)
    topk = sum(config.moe_router_topk or 0 for config in own)
    mtp = PUZZLE.mtp_num_layers * (PUZZLE.moe_router_topk or 0)
    ratio = (topk + mtp) / (len(own) * (PUZZLE.moe_router_topk or 0) + mtp)
    assert sent[PUZZLE] == pytest.approx(ratio * sent[PLAIN], rel=1e-12) and ratio < 1


def test_time_and_memory() -> None:
    machine = Machine(GPUS["gb200"])
    at, plain = (launch(c, PIPELINE, seq_length=8192, backend="te", microbatches=8) for c in (PUZZLE, PLAIN))
    times = layer_times(one_replica(at), machine)
    experts = {symbol: times[symbol] for symbol in times if letter(symbol) == "E"}
    assert max(one.products for one in experts.values()) > 2 * min(one.products for one in experts.values())
    assert step_time(at, machine).total < step_time(plain, machine).total
    for rank in range(4):
        assert memory(at, rank).total < memory(plain, rank).total
