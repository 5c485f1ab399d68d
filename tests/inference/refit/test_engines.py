"""The engines' parameters, against what their own loaders made, and against what was read in the sources.

The first is of tests/golden/make_engine_parameters.py. The second is written down by hand: vLLM's
`models/nemotron_h.py` at 00b08dc4 and `nemotron_h_mtp.py` at 01ca2773, SGLang's `models/nemotron_h.py` at
02c60328 and `nemotron_h_mtp.py` at 008b79d2. The shapes follow from the constructors and Super's published
config: hidden 4096, 32 heads and 2 KV heads of 128, 128 Mamba heads of 64, 8 groups of state 128, 512 experts
of 2688 on 1024, shared experts of 5376, 131072 tokens. One rank of TP 8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.parts import pack, parts_of, serving_parameters, space_of, unpack
from megatron_nemotron3.inference.refit.planner import make_plan
from megatron_nemotron3.models import get
from tests.golden.make_engine_parameters import crc, model, numbers
from tests.support.refit_ranks import empty_parameters
from tests.support.refit_reference import loaded, trained

B, F = torch.bfloat16, torch.float32
ATTENTION = {
    "norm.weight": ((4096,), B),
    "mixer.qkv_proj.weight": ((4 * 128 + 128 + 128, 4096), B),  # a KV head serves four ranks
    "mixer.o_proj.weight": ((4096, 4 * 128), B),
}
EXPERTS = {
    "norm.weight": ((4096,), B),
    "mixer.gate.weight": ((512, 4096), B),
    "mixer.gate.e_score_correction_bias": ((512,), F),
    "mixer.fc1_latent_proj.weight": ((1024, 4096), B),
    "mixer.fc2_latent_proj.weight": ((4096, 1024), B),
    "mixer.experts.w13_weight": ((512, 336, 1024), B),
    "mixer.experts.w2_weight": ((512, 1024, 336), B),
    "mixer.shared_experts.up_proj.weight": ((672, 4096), B),
    "mixer.shared_experts.down_proj.weight": ((4096, 672), B),
}
MAMBA = {
    "norm.weight": ((4096,), B),
    "mixer.in_proj.weight": ((1024 + 1024 + 128 + 128 + 16, 4096), B),
    "mixer.conv1d.weight": ((1024 + 128 + 128, 1, 4), B),
    "mixer.conv1d.bias": ((1280,), B),
    "mixer.A": ((16,), F),
    "mixer.D": ((16,), B),
    "mixer.dt_bias": ((16,), B),
    "mixer.norm.weight": ((1024,), B),
    "mixer.out_proj.weight": ((4096, 1024), B),
}
LAYERS = {"M": MAMBA, "E": EXPERTS, "*": ATTENTION}
OUTSIDE = {
    "model.embed_tokens.weight": ((16384, 4096), B),
    "model.norm_f.weight": ((4096,), B),
    "lm_head.weight": ((16384, 4096), B),
}
START = {"enorm.weight": ((4096,), B), "hnorm.weight": ((4096,), B), "eh_proj.weight": ((512, 8192), B)}
END = {"final_layernorm.weight": ((4096,), B)}
PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"


def parameters(engine: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Super's parameters, and below "draft." those of the MTP model that are not the target's."""
    found = dict(OUTSIDE)
    for prefix, pattern in (("", PATTERN), ("draft.", "*E")):
        for number, kind in enumerate(pattern):
            ends = (START if number == 0 else {}) | (END if number == 1 else {}) if prefix else {}
            for name, form in (LAYERS[kind] | ends).items():
                if engine == "vllm":  # FusedMoEFactory makes a runner, which has them in `routed_experts`
                    name = name.replace("experts.w", "experts.routed_experts.w")
                found[f"{prefix}model.layers.{number}.{name}"] = form
    return found


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_parameters_of_super_at_tp_8(engine: str) -> None:
    config = get("super")
    serving = EngineLayout(config=config, engine=engine, tp=8)
    plan = make_plan(Training.of(config, "tp=2,ep=8,pp=4"), serving)
    assert serving_parameters(plan, 5) == parameters(engine)


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
