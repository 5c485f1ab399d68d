"""The definitions of a precision report, against numbers worked out by hand and by other code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_nemotron3.precision.experts import ExpertRows, stacked_operand
from megatron_nemotron3.precision.products import dequantized, operand, padded
from megatron_nemotron3.precision.quantizer import fake_quantize, prepare
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.statistics import (
    ELEMENTS,
    ZEROS,
    Numbers,
    Sums,
    measure,
    numbers,
    rotated,
)
from tests.support.packed_operand import PUBLISHED

ROW, COLUMN = Spec(), Spec(axis=-2)
ROTATED = Spec(axis=-2, hadamard=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of(sums: Sums) -> Numbers:
    return numbers(sums.sums.sum(0).tolist(), float(sums.amax.max()))


def test_by_hand() -> None:
    """Largest magnitude 6: the block's scale is 1, so 0.2 rounds to 0, 3 is exact and 4.6 becomes 4."""
    x = torch.zeros(1, 16)
    x[0, :5] = torch.tensor([6.0, 0.2, -0.2, 3.0, 4.6])
    found = of(measure(x, ROW, fake_quantize(x, ROW)))
    signal = 36 + 2 * 0.04 + 9 + 4.6**2
    assert (found.elements, found.zeros, found.flushed, found.amax) == (16, 11 / 16, 2 / 5, 6.0)
    assert found.sqnr_db == pytest.approx(10 * math.log10(signal / (0.08 + 0.36)), abs=1e-4)


def test_nothing_to_divide_by() -> None:
    zero = of(measure(torch.zeros(2, 16), ROW, torch.zeros(2, 16)))
    assert zero.zeros == 1 and math.isnan(zero.flushed) and math.isnan(zero.sqnr_db) and zero.amax == 0
    empty = of(measure(torch.zeros(0, 16), ROW, torch.zeros(0, 16)))
    assert empty.elements == 0 and math.isnan(empty.zeros)
    exact = torch.full((1, 16), 6.0)
    assert of(measure(exact, ROW, exact)).sqnr_db == math.inf


def by_definition(x: Tensor) -> tuple[float, float]:
    """(SQNR in dB, flush share) of 1 x 16 blocks, in NumPy: nearest of all values by table."""
    values = x.double().numpy().reshape(-1, 16)
    e4m3 = np.sort(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy())
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    unit = np.abs(values).max() / 2688
    wanted = np.abs(values).max(1, keepdims=True) / 6 / unit
    scale = e4m3[np.abs(wanted[..., None] - e4m3).argmin(-1)] * unit
    q = np.sign(values) * e2m1[np.abs(np.abs(values / scale)[..., None] - e2m1).argmin(-1)] * scale
    noise = ((values - q) ** 2).sum()
    return 10 * math.log10((values**2).sum() / noise), float(((q == 0) & (values != 0)).mean())


def test_normal_numbers() -> None:
    x = normal(256, 256)
    found, (sqnr, flushed) = of(measure(x, ROW, fake_quantize(x, ROW))), by_definition(x)
    assert found.sqnr_db == pytest.approx(sqnr, abs=1e-3) and found.flushed == pytest.approx(
        flushed, abs=2e-5
    )
    assert 20.2 < sqnr < 20.6 and 0.063 < flushed < 0.072  # what the format does to N(0, 1)


def test_tiny_gradients_do_not_underflow() -> None:
    x = 1e-25 * normal(32, 32)
    big = of(measure(normal(32, 32), ROW, fake_quantize(normal(32, 32), ROW)))
    tiny = of(measure(x, ROW, fake_quantize(x, ROW)))
    assert tiny.sqnr_db == pytest.approx(big.sqnr_db, abs=0.05) and tiny.flushed == pytest.approx(
        big.flushed, abs=0.01
    )


def test_rotated_is_what_the_quantizer_rounds() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = normal(64, 48).to(dtype)
        assert torch.equal(rotated(x, ROTATED), prepare(x, ROTATED).x)
        found = of(measure(x, ROTATED, fake_quantize(x, ROTATED)))
        assert found.amax == float(prepare(x, ROTATED).x.abs().max())


def test_operands_mean_their_values() -> None:
    for how in (ROW, Spec(tile=True), ROTATED, Spec("mxfp8"), Spec("mxfp8", axis=-2)):
        x = normal(64, 64)
        values, wanted = dequantized(operand(x, how)), fake_quantize(x, how)
        assert torch.equal(values == 0, wanted == 0)
        torch.testing.assert_close(values, wanted, rtol=1e-6, atol=0)


def test_microbatches_add_up_to_the_batch() -> None:
    """Halves with the same largest magnitude are scaled as the whole."""
    first = normal(64, 32)
    x = torch.cat([first, first.flip(0)])
    whole = measure(x, ROW, fake_quantize(x, ROW))
    total = Sums.zero(1, x.device)
    for part in x.split(64):
        total.add(measure(part, ROW, fake_quantize(part, ROW)))
    assert torch.equal(total.amax, whole.amax)
    torch.testing.assert_close(total.sums, whole.sums, rtol=1e-12, atol=0)


@pytest.mark.parametrize("how", [COLUMN, ROTATED, ROW])
def test_experts_are_measured_apart(how: Spec) -> None:
    """Three experts with 5, 0 and 20 tokens: as each one alone; rows that only fill up do not count."""
    counts, x = [5, 0, 20], normal(25, 32)
    x[7] = 0
    rows = ExpertRows(counts, 16 if how.axis == -2 else 1, x.device)
    filled = rows.fill(x)
    found = measure(
        filled, how, dequantized(rows.operand(filled, how)), owner=rows.owner, groups=3, filler=rows.filler
    )
    for expert, part in ((0, x[:5]), (2, x[5:])):
        part = padded(part, 16) if how.axis == -2 else part
        alone = measure(part, how, dequantized(operand(part, how)))
        torch.testing.assert_close(found.sums[expert, 2:], alone.sums[0, 2:], rtol=1e-12, atol=0)
        assert found.amax[expert] == alone.amax[0]
    assert found.sums[1].abs().sum() == 0
    if not how.hadamard:
        assert found.sums[:, ELEMENTS].tolist() == [5 * 32, 0, 20 * 32]
        assert found.sums[:, ZEROS].tolist() == [0, 0, 32]
    else:
        assert found.sums[:, ELEMENTS].tolist() == [16 * 32, 0, 32 * 32]


def test_weights_of_experts() -> None:
    how = PUBLISHED.fprop[1]
    assert how is not None
    weights = [normal(32, 48, seed=s) * 10.0**s for s in range(3)]
    owner = torch.arange(3).repeat_interleave(32)
    found = measure(
        torch.stack(weights), how, dequantized(stacked_operand(weights, how)), owner=owner, groups=3
    )
    for expert, weight in enumerate(weights):
        alone = measure(weight, how, dequantized(operand(weight, how)))
        torch.testing.assert_close(found.sums[expert], alone.sums[0], rtol=1e-12, atol=0)
