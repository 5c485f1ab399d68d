"""Logits and gradients of whole models against transformers' NemotronHForCausalLM, same random weights.

FP32 on the CPU, 300 tokens: more than two chunks of 128, and not a multiple of one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megatron_nemotron3.models import Nemotron3Config, get

from .mapping import megatron_model, randomize, to_transformers, transformers_config

transformers = pytest.importorskip("transformers")

TOKENS, BATCH = 300, 2
#: Below 5.15.1 the oracle's scan on the CPU is wrong past the first chunk.
ORACLE_IS_RIGHT = (5, 15, 1)
LOGITS_ATOL = 1e-4
GRADIENT_RTOL = 1e-3
#: A score closer than this to the next expert's may be ranked differently by two right implementations.
ROUTING_MARGIN = 1e-5

MODELS = {
    # Every layer kind of Nano: M, E without a latent width, *.
    "nano": get("nano-tiny"),
    # Latent width; without MTP, which transformers does not build.
    "super": get("super-tiny").but(mtp_pattern=None, mtp_num_layers=0),
    # M, dense MLP, *.
    "nano-4b": get("nano-4b-tiny"),
}


class Run(NamedTuple):
    """What both sides made of the same weights and tokens."""

    model: Nemotron3Config
    logits: torch.Tensor
    expected_logits: torch.Tensor
    loss: float
    expected_loss: float
    gradients: dict[str, torch.Tensor]
    expected_gradients: dict[str, torch.Tensor]
    #: Per MoE layer, smallest distance between a chosen and a rejected expert.
    margins: list[float]


def oracle(model: Nemotron3Config, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model with `weights`; every one of its tensors is given exactly once."""
    config = transformers_config(model)
    config._attn_implementation = config._experts_implementation = "eager"
    result = transformers.NemotronHForCausalLM(config).eval()
    result.load_state_dict(weights, strict=True)
    for module in result.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)  # it clamps at time_step_min; the family does not
    return result


def routing_margin(router: Any, scores: torch.Tensor) -> float:
    """Smallest gap between the k-th and the next of the scores [..., N] with bias."""
    ranked = (scores.sigmoid() + router.expert_bias).sort(dim=-1, descending=True).values
    k = router.topk
    return float((ranked[..., k - 1] - ranked[..., k]).min())


@pytest.fixture(scope="module", params=MODELS)
def run(request: pytest.FixtureRequest, world: None) -> Run:
    model = MODELS[request.param]
    ours = megatron_model(model).eval()
    randomize(ours, seed=6)
    # `_extra_state` entries, which TE would fill, hold None here.
    weights = {n: t for n, t in ours.state_dict().items() if t is not None}
    theirs = oracle(model, to_transformers(weights, model))

    margins: list[float] = []
    for module in ours.modules():
        if hasattr(module, "expert_bias"):
            routing = module.routing
            module.routing = lambda logits, *a, m=module, f=routing, **k: (
                margins.append(routing_margin(m, logits.detach())) or f(logits, *a, **k)
            )
    generator = torch.Generator().manual_seed(11)
    stream = torch.randint(model.vocab_size, (BATCH, TOKENS + 1), generator=generator)
    tokens, labels = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
    positions = torch.arange(TOKENS).expand(BATCH, -1)

    with torch.no_grad():
        logits = ours(tokens, positions, None)
    loss = ours(tokens, positions, None, labels=labels).mean()
    loss.backward()
    expected_logits = theirs(tokens).logits
    expected_loss = F.cross_entropy(expected_logits.flatten(0, 1), labels.flatten())
    expected_loss.backward()
    return Run(
        model,
        logits,
        expected_logits.detach(),
        loss.item(),
        expected_loss.item(),
        to_transformers({n: p.grad for n, p in ours.named_parameters()}, model),
        {n: p.grad for n, p in theirs.named_parameters()},
        margins,
    )


def test_the_oracle_is_a_version_that_computes_the_scan() -> None:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:3])
    assert version >= ORACLE_IS_RIGHT


def test_every_layer_kind_is_covered() -> None:
    kinds = {kind for model in MODELS.values() for kind in model.pattern}
    assert kinds == set("ME*-")
    assert {bool(model.moe_latent_size) for model in MODELS.values() if model.is_moe} == {True, False}


def test_routing_has_no_ties(run: Run) -> None:
    # If this fails, choose another seed: the comparisons below would compare two different choices.
    assert all(margin > ROUTING_MARGIN for margin in run.margins)


def test_logits(run: Run) -> None:
    assert run.logits.shape == (BATCH, TOKENS, run.model.vocab_size)
    assert run.expected_logits.std() > 0.3  # not a comparison of zeros
    torch.testing.assert_close(run.logits, run.expected_logits, rtol=0, atol=LOGITS_ATOL)


def test_gradients(run: Run) -> None:
    assert run.loss == pytest.approx(run.expected_loss, abs=1e-5)
    assert run.gradients.keys() == run.expected_gradients.keys()
    for name, expected in run.expected_gradients.items():
        assert run.gradients[name].shape == expected.shape
        size = expected.norm()
        assert size > 0, name
        difference = (run.gradients[name] - expected).norm()
        assert difference <= GRADIENT_RTOL * size, f"{name}: {difference / size:.2e}"
