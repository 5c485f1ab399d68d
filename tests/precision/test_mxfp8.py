"""MXFP8 against exact arithmetic: exponents rounded up, elements to the nearest, the corners of the range."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.precision.quantizer import fake_quantize
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.scales import mxfp8_exponents, mxfp8_scales
from tests.support.packed_operand import quantize

ROW = Spec("mxfp8")


def _e4m3() -> list[Fraction]:
    """Non-negative values, by code."""
    result = []
    for code in range(127):
        exponent, mantissa = divmod(code, 8)
        result.append(((8 if exponent else 0) + mantissa) * Fraction(2) ** (max(exponent, 1) - 10))
    return result


VALUES = _e4m3()


def _reference(block: list[float]) -> tuple[int, list[Fraction]]:
    """(biased exponent, values) of a block of finite numbers, from the definition."""
    largest = max(abs(Fraction(v)) for v in block)
    exponent = -127
    while Fraction(2) ** exponent * 448 < largest:
        exponent += 1
    if exponent == -127:
        return 0, [Fraction(0)] * len(block)
    values = []
    for v in block:
        scaled = abs(Fraction(v)) / Fraction(2) ** exponent
        code = min(range(len(VALUES)), key=lambda c: (abs(VALUES[c] - scaled), c % 2))
        values.append((1 if v > 0 else -1) * VALUES[code] * Fraction(2) ** exponent)
    return exponent + 127, values


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    power=st.integers(-125, 120),
    spread=st.integers(0, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_block_is_the_definition(seed: int, power: int, spread: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 32, generator=generator)
    x *= torch.exp2(-torch.randint(0, spread + 1, (2, 32), generator=generator).float())
    x = (x * 2.0**power).to(dtype)
    made, values = quantize(x, ROW), fake_quantize(x, ROW, dtype=torch.float32)
    for row in range(2):
        biased, exact = _reference(x[row].tolist())
        assert made.scales[row].item() == biased
        assert [Fraction(v) for v in values[row].tolist()] == exact
    assert torch.equal(values, made.dequantize())


@pytest.mark.parametrize("exponent", [-100, -3, 0, 1, 90])
def test_448_is_the_last_that_fits(exponent: int) -> None:
    largest = torch.tensor([448.0]) * 2.0**exponent
    # One FP32 step below and above; the product with 1/448 rounds, but never past a power of two.
    below, above = (torch.nextafter(largest, torch.tensor([end])) for end in (0.0, torch.inf))
    assert mxfp8_exponents(torch.cat((below, largest, above))).tolist() == [
        e + exponent + 127 for e in (0, 0, 1)
    ]


def test_every_exponent_divides_and_multiplies_exactly() -> None:
    amax = 448.0 * torch.exp2(torch.arange(-126, 119).float())
    biased = mxfp8_exponents(amax)
    assert biased.tolist() == list(range(1, 246))
    scale = mxfp8_scales(amax)
    assert torch.equal(scale.encode * scale.block, torch.ones(245))
    assert torch.equal(scale.block, torch.exp2(torch.arange(-126, 119).float()))


def test_zero_and_the_smallest_become_zero() -> None:
    x = torch.zeros(3, 32)
    x[1, 4] = 448 * 2.0**-127
    x[2, 4] = 448 * 2.0**-126
    made = quantize(x, ROW)
    assert made.scales.flatten().tolist() == [0, 0, 1]
    assert not made.codes[:2].any() and made.codes[2, 4] == 0x7E
    assert not fake_quantize(x, ROW)[:2].any()
    assert fake_quantize(x, ROW)[2, 4] == x[2, 4]


def test_bytes_of_what_is_not_finite() -> None:
    assert mxfp8_exponents(torch.tensor([torch.nan, torch.inf])).tolist() == [255, 254]
