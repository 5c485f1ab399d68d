"""Packed operands in memory: sizes against what this package packs, shares against the census."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.plan.activations import PACKED, bytes_by_linear
from megatron_nemotron3.launch.plan.memory import memory, weight_copies
from megatron_nemotron3.models import get
from megatron_nemotron3.precision.formats import MXFP8, NVFP4
from megatron_nemotron3.precision.recipe import Spec
from tests.support.launches import launch
from tests.support.packed_operand import quantize

SUPER = get("super")
LAYOUT = ParallelLayout(tp=2, ep=64, dp=32)


def test_an_element_is_as_large_as_packed() -> None:
    values = torch.randn(256, 512)
    for format, spec in {NVFP4: Spec(), MXFP8: Spec(format=MXFP8)}.items():
        stored = quantize(values, spec)
        assert (stored.codes.nbytes + stored.scales.nbytes) / values.numel() == PACKED[format]


def test_the_tail_keeps_bf16() -> None:
    body = SUPER.pattern[:-14]
    share = body.count("M") / SUPER.pattern.count("M")
    assert bytes_by_linear(SUPER, NVFP4)["mamba_in"] == pytest.approx(share * 9 / 16 + (1 - share) * 2)
    assert bytes_by_linear(SUPER, NVFP4)["mamba_out"] == pytest.approx(share * 33 / 32 + (1 - share) * 2)
    # Latent projections and attention stay BF16 in the recipe, and are MXFP8 where all is.
    assert set(bytes_by_linear(SUPER, MXFP8)) - set(bytes_by_linear(SUPER, NVFP4)) == {"attention", "latent"}
    assert bytes_by_linear(SUPER, "bf16") == {}


def test_copies_of_weights() -> None:
    packing = launch(SUPER, LAYOUT, precision=NVFP4, backend="te")
    experts = 512 // 64 * 2 * 2688 * 1024
    shared = 2 * 4096 * 5376 // 2
    body = SUPER.pattern[:-14].count("E") / SUPER.pattern.count("E")
    expected = 2 * PACKED[NVFP4] * body * (experts + shared)
    assert weight_copies(SUPER, "E", NVFP4, (2, 1, 64)) == pytest.approx(expected, rel=1e-6)
    held, plain = memory(packing), memory(launch(SUPER, LAYOUT, backend="te"))
    assert held.packed_weights > 40 * expected * 0.9
    assert plain.packed_weights == 0
    assert held.total < plain.total
