"""E2M1 and E4M3 against their definitions: every code, halfway points, the nearest value of any number."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3.precision.numerics import e2m1, e4m3


def _values(mantissa_bits: int, exponent_bits: int, bias: int) -> list[Fraction]:
    """Magnitudes of a format by code, from the definition of a floating-point number."""
    result = []
    for code in range(1 << (mantissa_bits + exponent_bits)):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        hidden = 0 if exponent == 0 else 1 << mantissa_bits
        power = max(exponent, 1) - bias - mantissa_bits
        result.append((hidden + mantissa) * Fraction(2) ** power)
    return result


E2M1 = _values(1, 2, 1)
E4M3 = _values(3, 4, 7)[:-1]  # the last is NaN


def _nearest(x: Fraction, values: list[Fraction]) -> int:
    """The code of the nearest value; of two, the one whose last mantissa bit is 0."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - x), code % 2))


FORMATS = pytest.mark.parametrize(
    ("module", "values", "sign"), [(e2m1, E2M1, 8), (e4m3, E4M3, 128)], ids=["e2m1", "e4m3"]
)
NUMBERS = (
    st.floats(-1000, 1000, width=32)
    | st.floats(-0.125, 0.125, width=32)
    | st.floats(width=32, allow_nan=False)
)


def test_the_tables_are_the_definitions() -> None:
    assert list(map(Fraction, e2m1.MAGNITUDES)) == E2M1
    assert Fraction(e2m1.MAX) == E2M1[-1] == 6
    assert Fraction(e4m3.MAX) == E4M3[-1] == 448
    assert Fraction(e4m3.TINY) == E4M3[1]


@FORMATS
def test_every_code_has_its_value_and_gets_it_back(module, values, sign) -> None:
    codes = torch.arange(len(values), dtype=torch.uint8)
    for negative, factor in ((0, 1), (sign, -1)):
        decoded = module.decode(codes | negative)
        assert [Fraction(v) for v in decoded.tolist()] == [factor * v for v in values]
        expected = codes | negative
        if negative and module is e2m1:
            expected[0] = 0  # -0.0 is not below 0
        assert torch.equal(module.encode(decoded), expected)


@FORMATS
def test_halfway_points_go_to_the_even_mantissa_and_their_neighbors_do_not(module, values, sign) -> None:
    halves = [(a + b) / 2 for a, b in zip(values, values[1:])]
    points = torch.tensor([float(h) for h in halves])
    up = torch.nextafter(points, torch.tensor(1e9))
    down = torch.nextafter(points, torch.tensor(-1e9))
    even = [code + code % 2 for code in range(len(halves))]
    assert module.encode(points).tolist() == even
    assert module.encode(-points).tolist() == [sign + code for code in even]
    assert module.encode(up).tolist() == [code + 1 for code in range(len(halves))]
    assert module.encode(down).tolist() == list(range(len(halves)))


@FORMATS
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=20))
def test_any_number_gets_the_nearest_value(module, values, sign, numbers) -> None:
    codes = module.encode(torch.tensor(numbers)).tolist()
    for number, code in zip(numbers, codes):
        magnitude = values[-1] if abs(number) == float("inf") else Fraction(abs(number))
        assert code % sign == _nearest(magnitude, values)
        if number:
            assert code // sign == (number < 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_encoded_as_their_float32_value(dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[~x.isnan()]
    for module in (e2m1, e4m3):
        assert torch.equal(module.encode(x), module.encode(x.float()))
        assert torch.equal(module.decode(module.encode(x), dtype).float(), module.decode(module.encode(x)))


def test_e4m3_agrees_with_torch_within_range() -> None:
    x = torch.linspace(-448, 448, 100_001)
    assert torch.equal(e4m3.encode(x), x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(e4m3.decode(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan(), torch.ones(2) > 0)


@given(codes=st.lists(st.integers(0, 15), min_size=2, max_size=40).filter(lambda c: len(c) % 2 == 0))
def test_packing_puts_the_even_column_low_and_unpacking_undoes_it(codes: list[int]) -> None:
    tensor = torch.tensor([codes, codes[::-1]], dtype=torch.uint8)
    packed = e2m1.pack(tensor)
    assert packed[0].tolist() == [low | high << 4 for low, high in zip(codes[::2], codes[1::2])]
    assert torch.equal(e2m1.unpack(packed), tensor)
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)


def test_an_odd_number_of_columns_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="17 columns cannot be packed two in a byte"):
        e2m1.pack(torch.zeros(3, 17, dtype=torch.uint8))
