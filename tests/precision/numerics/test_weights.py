"""Quantized weights: ModelOpt's bytes, error bounds, bands, and what has no obvious answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3.precision.numerics import ALL_SCALES, FOUR_OVER_SIX, e2m1, e4m3, fp8, nvfp4

GOLDEN = Path(__file__).parents[2] / "golden" / "nvfp4_weights.npz"
CASES = (
    *("normal", "float32", "float16", "spread", "holes", "outlier", "exact", "tiny", "large", "column"),
    *("order", "odd", "subnormal", "equal", "ties"),
)
#: What the scale of a tensor times this represents: of NVFP4, four-over-six and FP8.
LARGEST = (nvfp4.MAX, nvfp4.FOUR_OVER_SIX_MAX, e4m3.MAX)
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def _weight(seed: int, rows: int, columns: int, dtype: torch.dtype, size: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * size).to(dtype)


def _nvfp4(weight: torch.Tensor, search: str = "") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    amax = nvfp4.amax(weight)
    return (*nvfp4.quantize(weight, amax, search), nvfp4.tensor_scale(amax, nvfp4.LARGEST[search]))


@pytest.mark.parametrize(("search", "form"), [("", ""), (FOUR_OVER_SIX, "four_"), (ALL_SCALES, "all_")])
def test_bytes_are_modelopts(search: str, form: str) -> None:
    with numpy.load(GOLDEN) as file:
        data = dict(file)
    assert {key.split(".")[0] for key in data} == set(CASES)
    for case in CASES:
        weight = torch.from_numpy(data[f"{case}.weight"]).view(getattr(torch, str(data[f"{case}.dtype"])))
        codes, bits, scale = _nvfp4(weight, search)
        stored = f"{case}.{form}"
        assert scale.numpy().tobytes() == data[f"{stored}scale_2"].tobytes(), case
        assert numpy.array_equal(bits.numpy(), data[f"{stored}scale"]), case
        assert numpy.array_equal(codes.numpy(), data[f"{stored}codes"]), case
        values = nvfp4.dequantize(codes, bits, scale)
        # As numbers: ModelOpt's table has +0 for the code of -0.
        assert torch.equal(values, torch.from_numpy(data[f"{stored}values"]).view(torch.bfloat16)), case


def test_scales_of_fp8_weights_are_modelopts() -> None:
    """Chosen by error between amax and 1.5 amax, which ModelOpt keeps in the type of the weight."""
    with numpy.load(GOLDEN) as file:
        data = dict(file)
    factors = {}
    for case in CASES:
        weight = torch.from_numpy(data[f"{case}.weight"]).view(getattr(torch, str(data[f"{case}.dtype"])))
        amax = nvfp4.amax(weight)
        errors = torch.stack([fp8.squared_errors(part, amax) for part in weight.split(3)]).sum(0)
        found = fp8.of_smaller_error(amax, errors, weight.dtype)
        assert found.numpy().tobytes() == data[f"{case}.fp8_amax"].tobytes(), case
        factors[case] = float(found / amax)
    assert factors["odd"] == pytest.approx(1.5, abs=0.01) and factors["normal"] == 1


MODELOPT = """
import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from megatron_nemotron3.precision.numerics import fp8, nvfp4
from tests.golden.make_nvfp4_weights import FOUR_OVER_SIX, all_scales, searched
for seed in range(12):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(-torch.randint(0, 2 * seed + 1, (257, 32), generator=generator).float())
    weight = torch.randn(257, 512, generator=generator) * 10.0 ** (2 * seed - 12)
    weight = (weight * spread.repeat_interleave(16, 1)).to((torch.bfloat16, torch.float32)[seed % 2])
    made, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
    forms = {"": (made, scale, scale_2), "4over6": searched(weight, FOUR_OVER_SIX), "mse": all_scales(weight)}
    for search, (made, scale, scale_2) in forms.items():
        amax = nvfp4.amax(weight)
        codes, bits = nvfp4.quantize(weight, amax, search)
        assert torch.equal(nvfp4.tensor_scale(amax, nvfp4.LARGEST[search]), scale_2), (seed, search)
        assert torch.equal(bits, scale.view(torch.uint8)), (seed, search)
        assert torch.equal(codes, made._quantized_data), (seed, search)
    made, scale = FP8QTensor.quantize(weight.float())
    ours = nvfp4.tensor_scale(nvfp4.amax(weight), 448)
    assert torch.equal(ours, scale), seed
    assert torch.equal(fp8.quantize(weight, ours), made._quantized_data.view(torch.uint8)), seed
"""


def test_bytes_are_modelopts_on_larger_weights() -> None:
    site = os.environ.get("MODELOPT_SITE")
    if not site:
        pytest.skip("MODELOPT_SITE names no folder with nvidia-modelopt")
    path = os.pathsep.join((site, str(Path(__file__).parents[3])))
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MODELOPT], check=True, env=os.environ | {"PYTHONPATH": path}
    )


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 5),
    dtype=st.sampled_from(TYPES),
    power=st.integers(-20, 15),
)
def test_the_error_is_within_a_step(
    seed: int, rows: int, blocks: int, dtype: torch.dtype, power: int
) -> None:
    """E2M1's widest step is 2 (from 4 to 6), so an element is off by at most the step of its block, and a
    scale that was rounded down by 1/16 cuts 6 * 16/15 to 6."""
    size = 2.0 ** (power if dtype != torch.float16 else power / 4)
    weight = _weight(seed, rows, 16 * blocks, dtype, size)
    codes, bits, scale = _nvfp4(weight)
    exact = weight.double()
    values = nvfp4.dequantize(codes, bits, scale, torch.float32).double()
    steps = (e4m3.decode(bits) * scale).double().repeat_interleave(16, 1)
    assert bool(((values - exact).abs() <= steps * 1.0001).all())
    largest = exact.abs().unflatten(1, (-1, 16)).amax(-1)
    assert bool(((e4m3.decode(bits) * scale).double() * 6 >= largest * (1 - 1 / 16)).all())
    # Where nothing saturates every element is the nearest that its block can hold.
    inside = (exact / steps).abs() <= 6
    nearest = e2m1.decode(e2m1.encode((exact / steps).float())).double() * steps
    assert bool((((values - exact).abs() <= (nearest - exact).abs() + steps * 1e-6) | ~inside).all())


@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 39), max_size=4))
def test_bands_make_the_whole(seed: int, cuts: list[int]) -> None:
    weight = _weight(seed, 40, 48, torch.bfloat16)
    edges = sorted({0, 40, *cuts})
    bands = [weight[a:b] for a, b in zip(edges, edges[1:])]
    amax = max(nvfp4.amax(band) for band in bands)
    assert torch.equal(amax, nvfp4.amax(weight))
    for search in nvfp4.LARGEST:
        parts = [nvfp4.quantize(band, amax, search) for band in bands]
        codes, bits = nvfp4.quantize(weight, amax, search)
        assert torch.equal(torch.cat([c for c, _ in parts]), codes)
        assert torch.equal(torch.cat([b for _, b in parts]), bits)
        assert torch.equal(nvfp4.block_scales(weight, amax, search), bits)
    eight = nvfp4.tensor_scale(amax, 448)
    assert torch.equal(torch.cat([fp8.quantize(band, eight) for band in bands]), fp8.quantize(weight, eight))


@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_quantized_once_stays(dtype: torch.dtype) -> None:
    weight = _weight(1, 16, 64, dtype)
    codes, bits, scale = _nvfp4(weight)
    values = nvfp4.dequantize(codes, bits, scale, torch.float32)
    again, _ = nvfp4.quantize(values, nvfp4.amax(weight))
    assert torch.equal(again & 0x77, codes & 0x77)  # 8, the code of -0, becomes 0
    eight = nvfp4.tensor_scale(nvfp4.amax(weight), 448)
    once = fp8.quantize(weight, eight)
    assert torch.equal(fp8.quantize(fp8.dequantize(once, eight, torch.float32), eight), once)


@pytest.mark.parametrize("dtype", TYPES)
def test_four_over_six_is_closer_to_most_weights(dtype: torch.dtype) -> None:
    """Of a block the largest becomes 4 only where that is closer; a bound of 256 costs a little elsewhere."""
    weight = _weight(4, 512, 64, dtype)
    sums = []
    for search in ("", FOUR_OVER_SIX):
        codes, bits, scale = _nvfp4(weight, search)
        error = nvfp4.dequantize(codes, bits, scale, torch.float64) - weight.double()
        sums.append(error.square().unflatten(1, (-1, 16)).sum(-1))
    largest = (e2m1.unpack(codes) & 7).unflatten(1, (-1, 16)).amax(-1)
    assert 0.2 < (largest == 6).double().mean() < 0.6  # 6 is the code of 4
    assert sums[1].sum() < 0.95 * sums[0].sum()


def _all_tried(weight: torch.Tensor) -> torch.Tensor:
    """Bits of the scale of least error: all 126 in turn, a later one only if its error is smaller."""
    blocks, amax = weight.float().unflatten(-1, (-1, 16)), nvfp4.amax(weight)
    unit = ((amax / torch.tensor(6.0)).reciprocal() * 448).reciprocal()
    least, chosen = (
        torch.full(blocks.shape[:-1], torch.inf),
        torch.zeros(blocks.shape[:-1], dtype=torch.uint8),
    )
    for bits in torch.arange(1, 127, dtype=torch.uint8):
        step = e4m3.decode(bits) * unit
        error = (e2m1.decode(e2m1.encode(blocks / step)) * step - blocks).square().sum(-1)
        least, chosen = torch.minimum(error, least), torch.where(error < least, bits, chosen)
    return chosen


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 5),
    dtype=st.sampled_from(TYPES),
    levels=st.sampled_from((0, 1, 2, 3, 8)),
    octaves=st.integers(0, 22),
)
def test_a_search_finds_the_least_error_of_all_scales(
    seed: int, rows: int, blocks: int, dtype: torch.dtype, levels: int, octaves: int
) -> None:
    """Normal weights, or ones of few values; blocks differ by up to so many octaves; a share is zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, blocks, 16, generator=generator)
    if levels:
        weight = weight.mul_(levels).round_() * 0.37
    weight[torch.rand(rows, blocks, 16, generator=generator) < seed % 3 / 4] = 0
    weight *= torch.exp2(-torch.randint(0, octaves + 1, (rows, blocks, 1), generator=generator).float())
    weight = weight.flatten(1).to(dtype)
    weight[0, 0] = 1.53
    codes, bits, scale = _nvfp4(weight, ALL_SCALES)
    assert torch.equal(bits, _all_tried(weight))
    errors = []
    for made, sizes in ((codes, bits), _nvfp4(weight)[:2]):
        error = nvfp4.dequantize(made, sizes, scale, torch.float64) - weight.double()
        errors.append(error.square().unflatten(1, (-1, 16)).sum(-1))
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())  # of every block, against largest magnitudes


@pytest.mark.parametrize(
    ("values", "scale", "steps"),
    [
        ([227.0] + [128.0] * 15, 64, 7),  # stores 128 as 2 * 64
        ([13 / 512] + [0.0] * 15, 13 / 512, 11),  # no smaller scale stores 13 * 2^-9
        ([178.0] + [12.0, 143.0, 11.0] * 5, 24, -3),  # cuts 178
    ],
)
def test_scales_far_from_those_of_the_largest_magnitudes_are_found(values, scale, steps) -> None:
    weight = torch.tensor([[2688.0] + [0.0] * 15, values])  # the tensor's scale is 1
    bits = _nvfp4(weight, ALL_SCALES)[1]
    assert torch.equal(bits, _all_tried(weight)) and e4m3.decode(bits).flatten().tolist() == [448, scale]
    assert (bits.int() - _nvfp4(weight)[1].int()).flatten().tolist() == [0, steps]


@pytest.mark.parametrize("power", [-100, -60, -23, 60, 120])
def test_a_search_of_all_scales_knows_no_smallest_and_no_largest_tensor(power: int) -> None:
    """Squares are kept within FP32, where ModelOpt's search gives all blocks the smallest scale."""
    weight = _weight(2, 9, 48, torch.float32, 1.0)
    codes, bits, scale = _nvfp4(weight, ALL_SCALES)
    same = _nvfp4(weight * 2.0**power, ALL_SCALES)
    assert torch.equal(same[0], codes) and torch.equal(same[1], bits) and same[2] == scale * 2.0**power


def test_a_search_of_all_scales_lessens_the_error_of_usual_weights() -> None:
    weight = _weight(4, 512, 64, torch.bfloat16)
    sums = []
    for search in nvfp4.LARGEST:
        values = nvfp4.dequantize(*_nvfp4(weight, search), torch.float64)
        sums.append(float((values - weight.double()).square().sum()))
    largest, every, four = sums
    assert every < four < largest and every < 0.9 * largest


def test_a_tensor_of_zeros_has_scales_that_are_numbers() -> None:
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    codes, bits, scale = _nvfp4(weight)
    assert scale == 1 / torch.tensor(2688.0) and not codes.any() and bool((bits == 0x38).all())
    assert not nvfp4.dequantize(codes, bits, scale).any()
    codes, bits, scale = _nvfp4(weight, FOUR_OVER_SIX)
    assert scale == 1 / torch.tensor(1536.0) and not codes.any() and bool((e4m3.decode(bits) == 448).all())
    codes, bits, scale = _nvfp4(weight, ALL_SCALES)
    assert scale == 1 / torch.tensor(2688.0) and not codes.any() and bool((bits == 1).all())
    for search in nvfp4.LARGEST:  # a rank may have no row
        assert nvfp4.quantize(weight[:0], nvfp4.amax(weight), search)[1].shape == (0, 2)
    eight = nvfp4.tensor_scale(nvfp4.amax(weight), 448)
    assert eight == 1 / torch.tensor(448.0) and not fp8.quantize(weight, eight).any()
    assert nvfp4.amax(torch.zeros(0, 16)) == 0


def test_blocks_of_zeros_and_of_little_have_scales_above_zero() -> None:
    weight = torch.zeros(3, 16)
    weight[0, 0], weight[1, 0] = 6.0, 1e-9
    codes, bits, _ = _nvfp4(weight)
    assert e4m3.decode(bits).flatten().tolist() == [448.0, 2.0**-9, 1.0]
    assert codes[1:].count_nonzero() == 0
    codes, bits, _ = _nvfp4(weight, ALL_SCALES)  # of scales with the same error the smallest
    assert e4m3.decode(bits).flatten().tolist() == [448.0, 2.0**-9, 2.0**-9] and not codes[1:].any()


def test_infinity_and_nan_are_refused() -> None:
    for bad in (float("inf"), -float("inf"), float("nan")):
        weight = torch.ones(4, 32)
        weight[2, 3] = bad
        with pytest.raises(ValueError, match="holds infinity or NaN"):
            nvfp4.amax(weight)
        for largest in LARGEST:
            with pytest.raises(ValueError, match="cannot be scaled"):
                nvfp4.tensor_scale(torch.tensor(abs(bad)), largest)


def test_magnitudes_that_no_scale_can_reach_are_refused() -> None:
    for largest in LARGEST:
        smallest = torch.tensor(largest * torch.finfo(torch.float32).tiny)
        assert nvfp4.tensor_scale(smallest, largest) >= torch.finfo(torch.float32).tiny
        for amax in (smallest / 2, torch.tensor(-1.0)):
            with pytest.raises(ValueError, match="cannot be scaled: expected 0, or .* and more"):
                nvfp4.tensor_scale(amax, largest)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="24 columns are not divisible by the NVFP4 block of 16"):
        nvfp4.quantize(torch.ones(2, 24), torch.tensor(1.0))
    codes, bits = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"block scales \[4, 3\] do not fit packed elements \[4, 16\]"):
        nvfp4.dequantize(codes, bits, torch.tensor(1.0))


def test_narrow_weights_are_divided_in_float32() -> None:
    for dtype in TYPES:
        weight = _weight(9, 64, 256, dtype)
        scale = nvfp4.tensor_scale(nvfp4.amax(weight), 448)
        bits = fp8.quantize(weight, scale)
        assert torch.equal(bits, fp8.quantize(weight.float(), scale))
        # Nobody else's element is nearer.
        error = (fp8.dequantize(bits, scale, torch.float64) - weight.double()).abs()
        for step in (1, -1):
            inside = (bits & 0x7F).int() + step
            other = (inside.clamp(0, 0x7E) | (bits & 0x80).int()).to(torch.uint8)
            theirs = (fp8.dequantize(other, scale, torch.float64) - weight.double()).abs()
            assert bool((error <= theirs * (1 + 1e-6)).all())


def test_a_scale_for_each_row() -> None:
    weight = _weight(5, 6, 32, torch.bfloat16) * torch.logspace(-3, 3, 6)[:, None].bfloat16()
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    values = fp8.dequantize(fp8.quantize(weight, scales), scales, torch.float32)
    assert bool(((values - weight.float()).abs() <= scales * 16).all())
    assert bool((values.abs().amax(1) > 0).all())
