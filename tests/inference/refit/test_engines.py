"""The engines' parameters against what their own loaders made (tests/golden/make_engine_parameters.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.parts import pack, parts_of, space_of, unpack
from megatron_nemotron3.inference.refit.planner import make_plan
from tests.golden.make_engine_parameters import crc, model, numbers
from tests.support.refit_ranks import empty_parameters
from tests.support.refit_reference import loaded, trained

GOLDEN: dict[tuple[str, str], dict[str, Any]] = {
    (engine, case): parameters
    for engine, facts in json.loads(
        (Path(__file__).parents[2] / "golden/engine_parameters.json").read_text()
    ).items()
    for case, parameters in facts["cases"].items()
}


@pytest.mark.parametrize(("engine", "case"), GOLDEN)
def test_servers_hold_what_the_engines_own_loaders_load(engine: str, case: str) -> None:
    name, vocabulary, layout = case.split(" ")
    config = model(name, int(vocabulary))
    hf, training = numbers(config), Training.of(config, "tp=2,ep=4" if config.is_moe else "tp=2,pp=2")
    # On a CPU, as on older GPUs, vLLM has its routers in FP32.
    serving = EngineLayout.of(config, layout, engine=engine, fp32_router=engine == "vllm")
    plan = make_plan(training, serving)
    sources = [trained(config, training.layout, rank, hf) for rank in range(training.layout.world_size)]
    for rank in range(plan.serving.size):
        expected = {
            n: [*how, sums[rank]]
            for n, (*how, sums) in GOLDEN[engine, case].items()
            if sums[rank] is not None
        }
        target = empty_parameters(plan, rank)
        for transfer, sender in plan.incoming(rank):
            parts = parts_of(transfer)
            message = torch.empty(space_of(parts), dtype=torch.uint8)
            pack(message, parts, sources[sender])
            unpack(message, parts, target)
        # The reference of the tests that send is the same, too.
        sizes = {size: getattr(plan.serving, size) for size in ("tp", "pp", "dp", "ep")}
        reference = loaded(config, engine, sizes, rank, hf)
        for held in (target, {n: t.to(target[n].dtype) for n, t in reference.items() if n in target}):
            assert {
                n: [str(t.dtype).removeprefix("torch."), list(t.shape), crc(n, t)] for n, t in held.items()
            } == expected
