"""Models whose E layers differ (`moe_layers`): the plan counts each layer with its own sizes."""

from __future__ import annotations

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.plan.flops import layer_operations, letter, model_operations, resolve, symbols
from megatron_nemotron3.launch.plan.traffic import step_traffic
from megatron_nemotron3.models import get
from tests.support.launches import launch

PUZZLE = get("puzzle")
PLAIN = PUZZLE.but(moe_layers=None)


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
