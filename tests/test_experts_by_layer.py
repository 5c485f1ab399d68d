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


def routed(model: Any, ids: Any) -> dict[str, set[int]]:
    """Name of each router -> how many experts it sends a token to, in a forward pass."""
    import torch

    found: dict[str, set[int]] = {}

    def watch(name: str, router: Any) -> None:
        def note(_module: Any, _inputs: Any, output: tuple[Any, Any]) -> None:
            found.setdefault(name, set()).update(output[1].sum(-1).tolist())

        router.register_forward_hook(note)

    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            watch(name, module)
    positions = torch.arange(ids.shape[1]).expand(*ids.shape)
    model(ids, positions, None, labels=ids)
    return found


def sizes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Name of each stacked expert weight -> [experts, width, input] of FC1."""
    return {
        name.removesuffix(".linear_fc1"): (module.num_gemms, *module.weight0.shape)
        for name, module in model.named_modules()
        if name.endswith("experts.linear_fc1") and "shared" not in name
    }


def built(config: Nemotron3Config) -> dict[str, Any]:
    """What a model of one rank sends where, and its sizes."""
    import torch

    from megatron_nemotron3 import build_model

    model = build_model(config, precision="fp32", backend="torch")
    ids = torch.arange(2 * 32).view(2, 32) % config.vocab_size
    configs = {id(layer.config): layer.config for layer in model.decoder.layers}
    return {
        "routed": routed(model, ids),
        "sizes": sizes_of(model),
        "model": (model.config.moe_ffn_hidden_size, model.config.moe_router_topk),
        "layers": {(c.moe_ffn_hidden_size, c.moe_router_topk) for c in configs.values()},
    }


@pytest.mark.parametrize("config", [PUZZLE, OWN], ids=lambda config: config.name)
def test_each_layer_has_its_own_width_and_sends_a_token_to_its_own_number(config: Nemotron3Config) -> None:
    (found,) = run_distributed(built, 1, config)
    assert config.moe_layers is not None and len(set(config.moe_layers)) > 2
    layers = [number for number, kind in enumerate(config.pattern) if kind == "E"]
    base = (config.moe_ffn_hidden_size, config.moe_router_topk)
    wanted = {
        f"decoder.layers.{number}.mlp": row for number, row in zip(layers, config.moe_layers, strict=True)
    }
    wanted["mtp.layers.0.mtp_model_layer.layers.1.mlp"] = base
    assert found["routed"] == {f"{name}.router": {topk} for name, (_, topk) in wanted.items()}
    assert found["sizes"] == {
        f"{name}.experts": (config.num_moe_experts, width, config.expert_input_size)
        for name, (width, _) in wanted.items()
    }
    # What all layers share is as Megatron's options say.
    assert found["model"] == base
    assert found["layers"] == {base, *config.moe_layers}


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
