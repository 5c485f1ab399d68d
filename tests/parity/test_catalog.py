"""Logits and gradients of the tiny form of every catalog model against transformers' NemotronHForCausalLM.

Same random weights, FP32 on the CPU, 300 tokens: more than two chunks of 128, and not a multiple of one.
What is compared, the differences seen and the tolerances: docs/measurements.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_nemotron3.models import get, identify, names
from tests.support import parity
from tests.support.model_mapping import megatron_model, randomize, to_transformers
from tests.support.parity import Comparison, compare, oracle, without_mtp

transformers = pytest.importorskip("transformers")

#: Before 5.15.1 transformers' scan on the CPU is wrong after the first chunk.
ORACLE_IS_RIGHT = (5, 15, 1)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in ("super", "puzzle", "nano-9b-v2") else pytest.mark.full)
        for name in parity.SEEDS
    ],
)
def run(request: pytest.FixtureRequest, world: None) -> Comparison:
    return compare(without_mtp(get(f"{request.param}-tiny")), seed=parity.SEEDS[request.param])


def test_the_oracle_is_a_version_that_computes_the_scan() -> None:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:3])
    assert version >= ORACLE_IS_RIGHT


@pytest.mark.parametrize("name", names())
def test_every_tiny_form_is_compared(name: str) -> None:
    """Under its own name, or under that of a model with the same one."""
    same = {model.name for model in identify(without_mtp(get(f"{name}-tiny")))}
    assert same & {f"{compared}-tiny" for compared in parity.SEEDS}


def test_every_layer_kind_is_covered() -> None:
    models = [get(f"{name}-tiny") for name in names()]
    assert {kind for model in models for kind in model.pattern} == set("ME*-")
    assert {bool(model.moe_latent_size) for model in models if model.is_moe} == {True, False}


def test_routing_has_no_ties(run: Comparison) -> None:
    # If this fails, choose another seed: the comparisons below would compare two different choices.
    assert run.routing_margin > parity.ROUTING_MARGIN
    assert 2 * run.score_difference < parity.ROUTING_MARGIN


def test_logits(run: Comparison) -> None:
    assert run.logits.shape == (parity.BATCH, parity.TOKENS, run.model.vocab_size)
    assert run.expected_logits.std() > 0.3  # not a comparison of zeros
    torch.testing.assert_close(run.logits, run.expected_logits, rtol=0, atol=parity.LOGITS_ATOL)


def test_gradients(run: Comparison) -> None:
    assert run.loss == pytest.approx(run.expected_loss, abs=1e-5)
    assert run.gradients.keys() == run.expected_gradients.keys()
    assert all(run.gradients[name].shape == g.shape for name, g in run.expected_gradients.items())
    assert all(g.norm() > 0 for g in run.expected_gradients.values())
    worst, name = max((d, n) for n, d in run.gradient_differences.items())
    assert worst <= parity.GRADIENT_RTOL, f"{name}: {worst:.2e}"


@pytest.mark.parametrize("name", [name for name in names() if get(name).has_mtp])
def test_mtp_leaves_the_main_logits_alone(world: None, name: str) -> None:
    """Bit for bit, so that the comparisons above hold for models that train with MTP."""
    model = get(f"{name}-tiny")
    plain, full = (megatron_model(m).eval() for m in (without_mtp(model), model))
    randomize(full, seed=1)
    weights = parity.weights_of(full)
    extra = plain.load_state_dict(weights, strict=False).unexpected_keys
    assert extra and {key.split(".")[0] for key in extra} == {"mtp"}
    ids = parity.text(model)[:, :-1]
    with torch.no_grad():
        assert torch.equal(parity.forward(full, ids), parity.forward(plain, ids))


# --- mistakes exceed the tolerance ---------------------------------------------------------------------


def each(theirs: Any, attribute: str, change: Callable[[Any], Any]) -> None:
    """Replace an attribute of every module that has it; a tensor in place."""
    for module in theirs.modules():
        old = getattr(module, attribute, None)
        if isinstance(old, torch.Tensor):
            old.data.copy_(change(old.data))
        elif old is not None:
            setattr(module, attribute, change(old))


#: Mistake -> the attribute of transformers' modules that it changes, and how.
MISTAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dt clamped at 0.001, as transformers has it": ("time_step_limit", lambda old: (1e-3, float("inf"))),
    "gated norm over all channels at once": ("group_size", lambda old: 8 * old),
    "no expert bias": ("e_score_correction_bias", torch.zeros_like),
    "attention scale off by 0.1 %": ("scaling", lambda old: 1.001 * old),
}


@pytest.fixture(scope="module")
def right(world: None) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Model, transformers' weights, ids [b, s] and logits [b, s, vocabulary]."""
    model = without_mtp(get("super-tiny"))
    ours = megatron_model(model)
    randomize(ours, seed=9)
    weights = to_transformers(parity.weights_of(ours), model)
    ids = parity.text(model)[:, :-1]
    with torch.no_grad():
        return model, weights, ids, oracle(model, weights)(ids).logits


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_breaks_the_tolerance(right: Any, mistake: str) -> None:
    model, weights, ids, logits = right
    theirs = oracle(model, weights)
    each(theirs, *MISTAKES[mistake])
    with torch.no_grad():
        difference = (theirs(ids).logits - logits).abs().max().item()
    assert difference > 5 * parity.LOGITS_ATOL, f"{difference:.1e}"
