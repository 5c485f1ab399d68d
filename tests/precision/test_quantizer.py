"""What the quantizers promise beyond bytes: identities, whose amax counts, known figures, and corners."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.precision import blocks
from megatron_nemotron3.precision.quantizer import fake_quantize, units
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.scales import (
    HADAMARD_SIGNS,
    hadamard_matrix,
    nvfp4_steps,
    product_scale,
    rotate,
)
from tests.support.packed_operand import PUBLISHED, quantize

from .test_quantizer_compiled import SPECS, TYPES


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sqnr(x: torch.Tensor, values: torch.Tensor) -> float:
    return 10 * torch.log10(x.double().square().sum() / (values - x).double().square().sum()).item()


def zeros(x: torch.Tensor) -> float:
    return (x == 0).double().mean().item()


# The forms agree


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    groups=st.integers(1, 3),
    columns=st.integers(1, 3),
    lead=st.sampled_from([(), (2,), (3, 1)]),
    dtype=st.sampled_from(TYPES),
    power=st.integers(-12, 12),
)
def test_fake_quantization_is_packing_and_unpacking(
    name: str, seed: int, groups: int, columns: int, lead: tuple[int, ...], dtype: torch.dtype, power: int
) -> None:
    x = normal(*lead, 32 * groups, 32 * columns, seed=seed) * 2.0**power
    x = (x * torch.exp2(-torch.randint(0, 12, x.shape, generator=generator(seed)).float())).to(dtype)
    before = x.clone()
    fast = fake_quantize(x, SPECS[name], generator(seed), dtype=torch.float32)
    slow = quantize(x, SPECS[name], generator(seed)).dequantize()
    assert torch.equal(fast, slow)
    assert torch.equal(x, before)
    assert torch.equal(fake_quantize(x, SPECS[name], generator(seed)), slow.to(dtype))


@pytest.mark.parametrize("name", SPECS)
def test_pieces_and_layouts_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(192, 160)
    whole = fake_quantize(x, SPECS[name], generator())
    turned = x.t().contiguous().t()
    for piece in (16, 1000, 4096):
        monkeypatch.setattr(blocks, "PIECE", piece)
        assert torch.equal(fake_quantize(turned, SPECS[name], generator()), whole)
    assert not fake_quantize(x.requires_grad_(), SPECS[name]).requires_grad


def test_threads_change_nothing() -> None:
    x, threads = normal(1024, 512), torch.get_num_threads()
    made = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            made.append([fake_quantize(x, s, generator()) for s in SPECS.values()])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_the_column_axis_is_the_row_axis_of_the_transpose() -> None:
    x = normal(64, 96)
    for row, column in (("row", "column"), ("rotated_row", "rotated"), ("mxfp8", "mxfp8_column")):
        assert torch.equal(fake_quantize(x, SPECS[column]), fake_quantize(x.t(), SPECS[row]).t())
    assert (fake_quantize(x, SPECS["column"]) != fake_quantize(x, SPECS["row"])).double().mean() > 0.5


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    dtype=st.sampled_from(TYPES),
)
def test_a_tiled_weight_is_the_same_transposed(
    seed: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    sizes = torch.exp2(normal(16 * rows, 1, seed=seed) * 3)
    w = (normal(16 * rows, 16 * columns, seed=seed) * sizes).to(dtype)
    tile = Spec(tile=True)
    assert torch.equal(fake_quantize(w, tile).t(), fake_quantize(w.t(), tile))
    by_row, by_column = quantize(w, tile), quantize(w, Spec(tile=True, axis=-2))
    assert torch.equal(by_row.dequantize(), by_column.dequantize())
    again = quantize(w.t(), tile)
    assert torch.equal(by_column.codes, again.codes) and torch.equal(by_column.scales, again.scales)


# The amax


def test_an_amax_from_outside_is_that_of_the_whole() -> None:
    """Tensor-parallel ranks that agree on the largest magnitude quantize their parts of one tensor."""
    x = normal(64, 128) * torch.exp2(normal(1, 128) * 2)
    for name in ("row", "tile", "rotated"):
        whole = units(x, SPECS[name])
        parts = [units(part.contiguous(), SPECS[name], amax=whole.amax) for part in x.split(64, 1)]
        assert torch.equal(torch.cat([p.values for p in parts], 1), whole.values)
        alone = [units(part.contiguous(), SPECS[name]) for part in x.split(64, 1)]
        assert not torch.equal(torch.cat([p.values for p in alone], 1), whole.values)
    made = units(x, Spec(axis=-2), amax=lambda found: found.amax() * 3)
    assert made.amax == x.abs().max() * 3
    assert torch.equal(made.values, units(x, Spec(axis=-2), amax=x.abs().max() * 3).values)


@pytest.mark.parametrize("name", ["row", "column", "tile", "rotated"])
def test_experts_that_share_a_tensor_have_scales_of_their_own(name: str) -> None:
    x = normal(3, 32, 48) * torch.tensor([1e-4, 1.0, 30.0])[:, None, None]
    made = fake_quantize(x, SPECS[name], amax=lambda found: found.amax((1, 2), keepdim=True))
    for expert, alone in enumerate(x):
        assert torch.equal(made[expert], fake_quantize(alone, SPECS[name]))
    assert not torch.equal(made, fake_quantize(x, SPECS[name]))
    rows = [16, 0, 48]  # tokens sorted by expert
    tokens = x.view(96, 48)[:64]

    def of_expert(found: torch.Tensor) -> torch.Tensor:
        groups = torch.tensor(rows) if found.shape[0] == 64 else torch.tensor(rows) // 16
        largest = [part.amax() if part.numel() else torch.zeros(()) for part in found.split(groups.tolist())]
        return torch.stack(largest).repeat_interleave(groups)[:, None]

    made = fake_quantize(tokens, SPECS[name], amax=of_expert)
    for part, values in zip(tokens.split(rows), made.split(rows), strict=True):
        assert torch.equal(values, fake_quantize(part, SPECS[name]))


# Products and rotation


def test_units_are_exact_and_their_product_is_the_product_of_the_values() -> None:
    for dtype in TYPES:
        x, w = normal(64, 128).to(dtype), (normal(96, 128, seed=1) * 0.02).to(dtype)
        made, values = [], []
        for source, operand in zip((x, w), PUBLISHED.fprop, strict=True):
            made.append(units(source, operand))
            assert made[-1].values.dtype == dtype and made[-1].values.abs().max() <= 2688
            exact = units(source, operand, dtype=torch.float32).values
            assert torch.equal(made[-1].values.float(), exact)
            values.append(fake_quantize(source, operand, dtype=torch.float32).double())
        a, b = made
        product = (a.values.float() @ b.values.float().t()) * product_scale(a.amax, b.amax)
        assert sqnr(values[0] @ values[1].t(), product) > 120


def test_a_step_is_multiplied_in_transformer_engines_order() -> None:
    block = torch.arange(1.0, 449.0).repeat(20)
    amax = normal(len(block)).abs()
    one = numpy.float32(1 / 2688)
    expected = (block.numpy() * amax.numpy()) * one
    assert numpy.array_equal(nvfp4_steps(block, amax).numpy(), expected)
    assert (block.numpy() * (amax.numpy() * one) != expected).any()


def test_the_transform_is_orthogonal_with_fixed_signs() -> None:
    h = hadamard_matrix(torch.device("cpu"), torch.float64)
    assert torch.equal(h @ h.t(), torch.eye(16, dtype=torch.float64))
    assert torch.equal(h[:, 0] * 4, torch.tensor(HADAMARD_SIGNS, dtype=torch.float64))
    assert HADAMARD_SIGNS == (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    # Sylvester: row i of H times row j is row i xor j.
    plain = h * h[:, :1] * 16
    for i in range(16):
        for j in range(16):
            assert torch.equal(plain[i] * plain[j], plain[i ^ j])


def test_rotating_both_operands_of_wgrad_changes_nothing() -> None:
    dy, x = normal(64, 48), normal(64, 80, seed=1)
    turned = []
    for operand in (dy, x):
        view = operand.view(4, 16, -1)
        turned.append(rotate(view, torch.empty_like(view)).view(operand.shape).double())
    exact = dy.double().t() @ x.double()
    assert sqnr(exact, turned[0].t() @ turned[1]) > 120
    assert not torch.allclose(turned[0].float(), dy, atol=0.1)


# Figures


@pytest.mark.parametrize(
    ("name", "decibels", "share"),
    [
        ("row", 20.4, 0.068),
        ("column", 20.4, 0.068),
        ("tile", 19.0, 0.10),
        ("stochastic", 17.3, None),
        ("mxfp8", 31.5, 0.0),
    ],
)
def test_normal_numbers_have_the_known_figures(name: str, decibels: float, share: float | None) -> None:
    x = normal(512, 1024)
    values = fake_quantize(x, SPECS[name], generator())
    assert sqnr(x, values) == pytest.approx(decibels, abs=0.15)
    assert share is None or zeros(values) == pytest.approx(share, abs=0.02 if name == "tile" else 0.003)


def test_tiles_flush_low_norm_rows() -> None:
    """The Super report's cause of zero gradients: a tile spans channels of high and of low norm."""
    w = normal(512, 1024)
    w[torch.rand(512, generator=generator(1)) < 0.3] *= 1e-2
    assert zeros(fake_quantize(w, Spec())) == pytest.approx(0.068, abs=0.005)
    assert zeros(fake_quantize(w, Spec(tile=True))) > 0.3


@pytest.mark.parametrize("name", ["row", "tile", "rotated", "stochastic", "wgrad_dy", "mxfp8"])
def test_powers_of_two_scale_through(name: str) -> None:
    """From 2^-66 (1e-20) to 2^20 (1e6): the values scale exactly, so nothing is lost that was there."""
    x = normal(64, 96)
    one = fake_quantize(x, SPECS[name], generator())
    for power in (-66, -40, -13, 7, 20):
        assert torch.equal(fake_quantize(x * 2.0**power, SPECS[name], generator()), one * 2.0**power)


# Corners


@pytest.mark.parametrize("name", SPECS)
def test_zeros_nothing_and_what_is_not_finite(name: str) -> None:
    """Emulation must not hide an overflow: Megatron skips the step when a gradient is not finite."""
    spec = SPECS[name]
    for dtype in TYPES:
        zero = torch.zeros(32, 64, dtype=dtype)
        assert torch.equal(fake_quantize(zero, spec), zero)
        assert not torch.signbit(fake_quantize(-zero, spec)).any()
    for shape in ((0, 64), (3, 0, 32)):
        nothing = torch.zeros(shape)
        assert fake_quantize(nothing, spec).shape == quantize(nothing, spec).dequantize().shape == shape
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = normal(32, 64)
        x[5, 7] = bad
        values = fake_quantize(x, spec, generator())
        assert not values[5, 7].isfinite()
        if bad is torch.nan and spec.format == "nvfp4":
            assert bool(values.isnan().all())
        if spec.format == "mxfp8":
            assert (~values.isfinite()).sum() == 32  # its block


def test_operands_that_nobody_has_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"format": "mxfp4"}, "format 'mxfp4' is unknown: use one of nvfp4, mxfp8"),
        ({"axis": 0}, "blocks along axis 0 are not supported: use -1 or -2"),
        ({"format": "mxfp8", "stochastic": True}, "MXFP8 has no stochastic"),
        ({"format": "mxfp8", "four_over_six": True}, "MXFP8 has no four_over_six"),
        ({"tile": True, "hadamard": True}, "use tile or hadamard, not both"),
        ({"four_over_six": True, "stochastic": True}, "four-over-six goes with rounding to nearest"),
        ({"four_over_six": True, "hadamard": True, "axis": -2}, "four-over-six goes with rounding"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            Spec(**arguments)


def test_tensors_that_do_not_fit_are_refused() -> None:
    for x, operand, message in (
        (torch.zeros(4, 24), Spec(), r"axis -1 of \[4, 24\] is not divisible by the nvfp4 block of 16: pad"),
        (torch.zeros(24, 16), Spec(axis=-2), r"axis -2 of \[24, 16\] is not divisible"),
        (torch.zeros(24, 16), Spec(tile=True), r"axis -2 of \[24, 16\] is not divisible"),
        (torch.zeros(4, 48), Spec("mxfp8"), "not divisible by the mxfp8 block of 32"),
        (torch.zeros(16), Spec(), r"shape \[16\] has 1 axes: 2 or more"),
        (torch.zeros(16, 16, dtype=torch.float64), Spec(), "torch.float64 cannot be quantized"),
    ):
        with pytest.raises(ValueError, match=message):
            fake_quantize(x, operand)
    x = torch.zeros(32, 32)
    with pytest.raises(ValueError, match="MXFP8 has no scale for the whole tensor: leave amax out"):
        fake_quantize(x, Spec("mxfp8"), amax=torch.tensor(1.0))
    with pytest.raises(ValueError, match="mxfp8 has no scale for the whole tensor: use fake_quantize"):
        units(x, Spec("mxfp8"))
