"""Models whose E layers have experts of their own width and number per token (`moe_layers`)."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.stack_specs import (
    MODULE,
    experts_text,
    has_spec,
    models_by_spec,
    spec_name,
    stored_experts,
)
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.models import build_hybrid

PUZZLE = get("puzzle-tiny")
#: Three E layers, none like another, behind a Mamba, an attention and an E layer.
OWN = get("super-tiny").but(
    name="mine", pattern="ME*EE", num_moe_experts=8, moe_layers=((32, 2), (96, 5), (64, 3)), moe_router_topk=4
)


def experts_of(config: Nemotron3Config) -> dict[str, tuple[int, int]]:
    """Name of each MoE layer -> width and number per token; "": what Megatron's options say."""
    from megatron_nemotron3 import build_model

    model = build_model(config, precision="fp32", backend="torch")
    found = {
        name.removesuffix(".mlp"): (module.experts.linear_fc1.weight0.shape[0], module.router.topk)
        for name, module in model.named_modules()
        if name.endswith(".mlp") and hasattr(module, "router")
    }
    return {"": (model.config.moe_ffn_hidden_size, model.config.moe_router_topk), **found}


@pytest.mark.parametrize("config", [PUZZLE, OWN], ids=lambda config: config.name)
def test_each_layer_has_its_own_width_and_number_per_token(config: Nemotron3Config) -> None:
    """Their logits: tests/checkpoints/convert/test_experts_by_layer.py."""
    (found,) = run_distributed(experts_of, 1, config)
    assert config.moe_layers is not None and len(set(config.moe_layers)) > 2
    layers = [number for number, kind in enumerate(config.pattern) if kind == "E"]
    wanted = {f"decoder.layers.{number}": row for number, row in zip(layers, config.moe_layers, strict=True)}
    base = (config.moe_ffn_hidden_size, config.moe_router_topk)
    assert found == {"": base, "mtp.layers.0.mtp_model_layer.layers.1": base, **wanted}


def refused(pattern: str, changes: dict[str, Any]) -> str:
    """Why a stack with `OWN`'s experts cannot be built; "" if it can."""
    from megatron_nemotron3.specs import stack_spec

    initialize(pp=1 + pattern.count("|"))
    try:
        build_hybrid(pattern, stack_spec("torch", OWN), **changes)
    except ValueError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize(
    ("pattern", "changes", "message"),
    [
        ("ME*EE", {}, ""),
        ("ME*EEM", {}, "mine, which has 5 layers, but --hybrid-layer-pattern has 6"),
        ("MEE*E", {}, "mine, whose layer 3 is '*', but --hybrid-layer-pattern has another there"),
        ("ME*EE", {"num_moe_experts": 4}, "a token gets up to 5, but --num-experts is 4"),
    ],
)
def test_the_table_must_fit_the_pattern(pattern: str, changes: dict[str, Any], message: str) -> None:
    (said,) = run_distributed(refused, 1, pattern, changes)
    assert message in said and bool(said) == bool(message)
    assert not message or "megatron_nemotron3.specs.stack_spec" in said


def test_every_stage_compares_its_own_part() -> None:
    """The second stage begins with layer 4, where the model has another kind."""
    first, second = run_distributed(refused, 2, "ME*|ME", {})
    assert first == "" and "layer 4 is 'E'" in second


def with_own_config(sizes: tuple[int, int] | None) -> tuple[int, int] | str:
    """Width and top-k of layer 5 of `OWN`, whose own config has these sizes or those of all layers."""
    from copy import copy

    from megatron_nemotron3.layers.stack import SizedMoELayer
    from megatron_nemotron3.specs import stack_spec

    initialize()
    shared = build_hybrid("ME*EE", stack_spec("torch", OWN)).config
    own = copy(shared)
    if sizes:
        own.moe_ffn_hidden_size, own.moe_router_topk = sizes
    spec = stack_spec("torch", OWN).submodules.moe_layer
    try:
        layer = SizedMoELayer(own, spec.submodules, model=OWN, shared=shared, layer_number=5)
    except ValueError as problem:
        return str(problem)
    return layer.mlp.experts.linear_fc1.weight0.shape[0], layer.mlp.router.topk


def test_configs_of_layers_that_a_launch_gives() -> None:
    """The model's sizes, or those of all layers, which the model's replace; others are an error."""
    for sizes in ((64, 3), None):
        assert run_distributed(with_own_config, 1, sizes) == [(64, 3)], sizes
    (said,) = run_distributed(with_own_config, 1, (48, 3))
    assert said.startswith(
        "layer 5 has experts of width 48 and top 3 by its config, and 64 and 3 in mine: use"
    )


def test_names_of_the_catalog() -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_nemotron3 import specs

    known = models_by_spec()
    assert "nemotron3_puzzle_torch_stack_spec" in known and "nemotron3_puzzle_tiny_te_stack_spec" in known
    for name, (_, model) in known.items():
        spec = vars(specs)[name]
        assert isinstance(spec, ModuleSpec) and spec.submodules.model == model
    assert has_spec(PUZZLE) and has_spec(get("super")) and not has_spec(OWN)
    assert not has_spec(PUZZLE.but(moe_layers=(*(PUZZLE.moe_layers or ())[1:], (32, 2))))
    name = spec_name(OWN, "torch")
    assert name == "nemotron3_torch_stack_spec@ME*EE@32:2,96:5,64:3"
    made = specs.named(MODULE, name)
    assert made is not None and made.submodules.model is not None and vars(specs)[name] is made
    assert (made.submodules.model.pattern, made.submodules.model.moe_layers) == (OWN.pattern, OWN.moe_layers)
    assert stored_experts({"spec": [MODULE, name]}) == experts_text(OWN)
    for table, said in (
        ("@ME*EE@32:2,96:5", "moe_layers has 2 rows, but pattern has 3 E layers"),
        ("@ME*EE@32:2,96:5,64", "is not of the form"),
        ("@ME*EE", "names no experts"),
    ):
        with pytest.raises(ValueError, match=said):
            specs.named(MODULE, f"nemotron3_torch_stack_spec{table}")
    with pytest.raises(ValueError, match="unknown spec"):
        specs.named(MODULE, "nemotron3_jax_stack_spec@ME*EE@32:2,96:5,64:3")
    with pytest.raises(ValueError, match="backend 'tpu': use auto, te, torch"):
        specs.stack_spec("tpu", OWN)
