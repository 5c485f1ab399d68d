"""The load-balancing loss of experts that MTP depths share counts once with our MTP layer.

Upstream's layer counts it twice in megatron-core 0.19, and once where its hybrid stack tells the experts that
they are in MTP (main, Megatron-LM #6748). Ours must then leave it as it is.

Oracle: the sequence-level auxiliary loss by its definition (DeepSeek-V3, arXiv 2412.19437, eq. 17-20),
N / k * sum_i f_i P_i per sequence, computed here from the logits of each visit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_nemotron3.layers.mtp import MTPLayer
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.specs import nemotron3_torch_stack_spec
from tests.support.models import SIZES, build_hybrid

SEQUENCE, BATCH = 32, 3
#: The coefficient of NVIDIA's recipes is 1e-4; the size does not matter here, it divides out.
COEFFICIENT = 0.01
METRIC = "seq_load_balancing_loss"


class ToldButNotNumbered(MultiTokenPredictionLayer):
    """The obvious repair, without the layer number: Megatron-LM #7172."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, TopKRouter):
                module.is_mtp_layer = True


LAYERS = {"ours": MTPLayer, "upstream": MultiTokenPredictionLayer, "told": ToldButNotNumbered}


@dataclass(frozen=True)
class Step:
    """Results of one backward pass of the auxiliary losses only."""

    slots: list[float]  # the tracker's values, one per decoder layer and MTP depth
    gradient: torch.Tensor  # of the MTP router's weight [N, d]
    expected: dict[str, list[float]]  # "decoder", "mtp": the defined loss of every visit of that router
    told: bool  # whether MTP's router knows that it is in MTP


def stack_spec(layer: str) -> ModuleSpec:
    """Our torch stack around the named MTP layer class."""
    submodules = nemotron3_torch_stack_spec.submodules
    block = submodules.mtp_block_spec
    (old,) = block.submodules.layer_specs
    new = ModuleSpec(module=LAYERS[layer], submodules=old.submodules)
    mtp = ModuleSpec(module=block.module, submodules=replace(block.submodules, layer_specs=[new]))
    return ModuleSpec(
        module=nemotron3_torch_stack_spec.module, submodules=replace(submodules, mtp_block_spec=mtp)
    )


def defined_loss(logits: torch.Tensor) -> float:
    """[s, b, N] -> the mean over sequences of N / k * sum_i f_i P_i."""
    k, experts = SIZES["moe_router_topk"], SIZES["num_moe_experts"]
    total = 0.0
    for sequence in logits.detach().double().unbind(1):
        scores = sequence.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(k, dim=1).indices, 1.0)
        total += float(experts / k * (chosen.mean(0) * scores.mean(0)).sum())
    return total / logits.shape[1]


def step(layer: str, pattern: str) -> Step:
    """One training step of `pattern` in which only the auxiliary losses have a gradient."""
    initialize()
    model = build_hybrid(
        pattern,
        stack_spec(layer),
        mtp_use_repeated_layer=parse_hybrid_pattern(pattern).mtp_num_depths > 1,
        moe_aux_loss_coeff=COEFFICIENT,
        mtp_loss_scaling_factor=0.0,
    )
    expected: dict[str, list[float]] = {"decoder": [], "mtp": []}
    routers = {name: m for name, m in model.named_modules() if isinstance(m, TopKRouter)}

    def watch(where: str, router: TopKRouter) -> None:
        gating = router.gating

        def gating_and_note(x: torch.Tensor) -> torch.Tensor:
            logits = gating(x)
            expected[where].append(defined_loss(logits.view(SEQUENCE, BATCH, -1)))
            return logits

        router.gating = gating_and_note

    for name, router in routers.items():
        watch(name.split(".")[0], router)
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE))
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    try:
        losses = model(tokens, positions, None, labels=tokens.roll(-1, 1))
        (0.0 * losses.sum()).backward()
    finally:
        MTPLossLoggingHelper.tracker = {}
    (mtp,) = (router for name, router in routers.items() if name.startswith("mtp."))
    slots = get_moe_metrics_tracker().metrics[METRIC].values.tolist()
    return Step(slots, mtp.weight.grad.clone(), expected, mtp.is_mtp_layer)


@functools.cache
def run(layer: str, pattern: str) -> Step:
    """`step` in a world of one."""
    result: Step = run_distributed(step, 1, layer, pattern)[0]
    return result


TWO_DEPTHS = "ME/*E/*E"


def test_metric_is_counted_once_and_under_mtp() -> None:
    ours = run("ours", TWO_DEPTHS)
    decoder, mtp = ours.expected["decoder"], ours.expected["mtp"]
    # Slots: decoder layers M and E, MTP depths 1 and 2 (one layer that repeats: everything in the first).
    assert ours.slots == pytest.approx([0, decoder[0], sum(mtp) / 2, 0], rel=1e-5)


def test_upstream_counts_twice_unless_it_tells_the_router() -> None:
    """0.19: one slot holds every visit. main: the same sum as ours, under the number inside the block."""
    upstream = run("upstream", TWO_DEPTHS)
    decoder, mtp = upstream.expected["decoder"], upstream.expected["mtp"]
    slots = [0, decoder[0], 0, sum(mtp) / 2] if upstream.told else [0, decoder[0] + sum(mtp), 0, 0]
    assert upstream.slots == pytest.approx(slots, rel=1e-5)


def test_gradient_is_counted_once() -> None:
    """Ours is the same everywhere: half of upstream's, or all of it where upstream divides itself."""
    ours, upstream = run("ours", TWO_DEPTHS), run("upstream", TWO_DEPTHS)
    # Same weights and tokens: two visits of the shared router, the same losses by definition.
    assert len(ours.expected["mtp"]) == 2 and len(ours.expected["decoder"]) == 1
    assert ours.expected == upstream.expected
    assert ours.told and ours.gradient.norm() > 0
    times = 1 if upstream.told else 2
    torch.testing.assert_close(upstream.gradient, times * ours.gradient, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("pattern", ["ME/*E", "M/**E", "E/E"])
def test_one_depth_is_logged_in_its_slot(pattern: str) -> None:
    """Megatron-LM #7172: the tracker has one slot behind the decoder's layers, and it is the one used."""
    ours = run("ours", pattern)
    layers = pattern.split("/")[0]
    decoder = [ours.expected["decoder"][0] if symbol == "E" else 0.0 for symbol in layers]
    assert ours.slots == pytest.approx([*decoder, *ours.expected["mtp"]], rel=1e-5)


@pytest.mark.full  # what upstream's layers do
@pytest.mark.parametrize(("layer", "pattern"), [("told", "ME/*E"), ("upstream", "M/**E")])
def test_the_inner_layer_number_overruns_the_tracker(layer: str, pattern: str) -> None:
    """The reason why `MTPLayer` renumbers: without it these raise the errors that users report."""
    with pytest.raises(IndexError):
        run(layer, pattern)


def test_one_depth_has_the_same_gradient_as_upstream() -> None:
    """With one depth there is nothing to divide: only the logging differs."""
    torch.testing.assert_close(run("ours", "ME/E").gradient, run("upstream", "ME/E").gradient)
