"""LoRA in any layout against one process: losses, gradients, steps; and what is not an adapter stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify.compare import reference, weights
from megatron_nemotron3.proof.certify.world import train
from tests.parallel.case import Case
from tests.parallel.compare import check
from tests.parallel.layouts import CASES, LAYOUTS

#: Every linear that can have an adapter.
EVERY = (
    "dim=4,alpha=8,targets=linear_qkv+linear_proj+linear_fc1+linear_fc2+in_proj+out_proj+fc1_latent_proj"
    "+fc2_latent_proj+eh_proj"
)
ROWS = [
    pytest.param(model, name, marks=() if quick else pytest.mark.full, id=f"{model}-{name}")
    for model, name, quick in (
        ("super", "TP2 SP EP2 alltoall", False),
        ("super", "TP2 SP, expert TP2, alltoall", False),
        ("super", "TP2 SP EP2, expert TP2", True),
        ("super", "EP2 alltoall", False),
        ("super", "PP2", False),
        ("super", "PP2 VPP2", False),
        ("super", "DP2 distributed optimizer, overlapped", False),
        ("dense", "TP2", False),
        ("nano", "CP2", False),
    )
]


def case_of(model: str, lora: str = EVERY) -> Case:
    return replace(CASES[model], lora=lora, steps=2)


@pytest.mark.parametrize(("model", "layout"), ROWS)
def test_layout_equals_one_process(model: str, layout: str) -> None:
    row, one = LAYOUTS[layout], case_of(model)
    if row.per_token and not one.config.has_mtp:
        one = replace(one, extra=(*one.extra, "--calculate-per-token-loss"))
    check(one, one.at(row.sizes, *row.extra, without=row.without))


def test_only_adapters_are_trained() -> None:
    """Weights, norms, embedding and the routers' correction end as they began, to the bit."""
    one = case_of("super")
    before, after = weights(one), reference(one)
    for key, value in after.weights.items():
        adapter = ".adapter." in key
        assert adapter != value.equal(before[key]), key
        if not key.endswith("expert_bias"):
            assert adapter == bool(after.gradients[key].any()), key


@pytest.mark.full
def test_a_stage_without_adapters() -> None:
    """Gradients pass through a pipeline stage that trains nothing, and it takes part in every step."""
    one = case_of("super", "dim=4,targets=decoder.layers.1.*linear_fc2")
    check(one, one.at(ParallelLayout(pp=2)))


@pytest.mark.full
def test_recomputed_layers_have_gradients() -> None:
    """Full recomputation drops gradients of layers whose input needs none: the embedding's output does."""
    one = case_of("super")
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    found = train(replace(one, extra=(*one.extra, *full)), weights(one))
    for key, value in reference(one).gradients.items():
        torch.testing.assert_close(found.gradients[key], value, rtol=1e-4, atol=1e-6, msg=key)
