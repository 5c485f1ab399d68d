"""What the quantizers promise of numbers: the rotation, stochastic rounding, statistics, invariance."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.precision.quantizer import fake_quantize, prepare, units
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.scales import (
    HADAMARD_SIGNS,
    hadamard_matrix,
    nvfp4_scales,
    nvfp4_steps,
    rotate,
)
from tests.precision.test_quantizer import SPECS, _generator, _normal, _sqnr, _zeros

# Hadamard


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
    dy, x = _normal(64, 48), _normal(64, 80, seed=1)
    turned = []
    for operand in (dy, x):
        view = operand.view(4, 16, -1)
        turned.append(rotate(view, torch.empty_like(view)).view(operand.shape).double())
    exact = dy.double().t() @ x.double()
    assert _sqnr(exact, turned[0].t() @ turned[1]) > 120
    assert not torch.allclose(turned[0].float(), dy, atol=0.1)


def test_the_rotation_rounds_to_the_dtype_before_the_scales() -> None:
    x = _normal(64, 32).bfloat16()
    found = prepare(x, Spec(axis=-2, hadamard=True))
    assert found.x.dtype == torch.bfloat16 and found.overwritable
    assert found.amax == found.x.float().abs().max()
    exact = hadamard_matrix(x.device).t() @ x.float().view(4, 16, 32)
    assert torch.equal(found.x, exact.bfloat16().view(64, 32))


def test_the_transform_saves_elements_from_zero_and_not_the_signal() -> None:
    """Outliers in a gradient: fewer zeros, and a lower SQNR. This pins the trade, not a gain."""
    generator = _generator(3)
    dy = _normal(1024, 256, seed=4)
    dy[torch.rand(dy.shape, generator=generator) < 1e-3] *= 100
    plain = fake_quantize(dy, Spec(axis=-2))
    turned = fake_quantize(dy, Spec(axis=-2, hadamard=True))
    assert _zeros(plain) > 0.08 and _zeros(turned) < _zeros(plain) * 0.9
    back = (hadamard_matrix(dy.device) @ turned.view(-1, 16, 256)).view(dy.shape)
    assert _sqnr(dy, back) < _sqnr(dy, plain)


# Stochastic rounding


def test_the_mean_of_draws_converges_away_from_block_maxima() -> None:
    x, row, generator = _normal(64, 64), Spec(stochastic=True), _generator(1)
    draws, total = 2000, torch.zeros(64, 64, dtype=torch.float64)
    for _ in range(draws):
        total += fake_quantize(x, row, generator)
    mean = total / draws
    magnitudes = x.view(64, 4, 16).abs()
    is_max = (magnitudes == magnitudes.amax(2, keepdim=True)).view(64, 64)
    scale = nvfp4_scales(magnitudes.amax(2), x.abs().max())
    step = nvfp4_steps(scale.block, x.abs().max()).repeat_interleave(16, 1).double()
    cut_off = (x.view(64, 4, 16) * scale.encode[..., None]).abs().view(64, 64) > 6
    assert 0 < (cut_off & ~is_max).sum() < 20  # now and then the second largest, too
    # An element's spacing is at most 2 steps, its deviation at most 1.
    bound = 5 * step / draws**0.5
    assert bool(((mean - x).abs() < bound)[~cut_off].all())
    nearest = fake_quantize(x, Spec()).double()
    assert ((nearest - x).abs() > bound)[~cut_off].double().mean() > 0.5
    # Where the block scale is rounded down the maximum saturates: smaller on average, by 1.1 %.
    ratio = (mean.abs() / x.abs().double())[is_max].mean().item()
    assert ratio == pytest.approx(1 - 0.011, abs=0.004)


def test_draws_are_neighbors_seeded_and_new_every_time() -> None:
    x, row = _normal(64, 64), Spec(stochastic=True)
    a, b = fake_quantize(x, row, _generator(1)), fake_quantize(x, row, _generator(1))
    assert torch.equal(a, b)
    generator = _generator(1)
    assert torch.equal(fake_quantize(x, row, generator), a) and not torch.equal(
        fake_quantize(x, row, generator), a
    )
    magnitudes = x.view(-1, 16).abs()
    scale = nvfp4_scales(magnitudes.amax(1, keepdim=True), x.abs().max())
    scaled = (x.view(-1, 16) * scale.encode).clamp(-6, 6).flatten()
    values = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
    drawn = (units(x, row, _generator(1)).values.view(-1, 16) / scale.block).flatten()
    upper = values[torch.searchsorted(values, scaled)]
    lower = values[torch.searchsorted(values, scaled, right=True) - 1]
    assert bool(((drawn == upper) | (drawn == lower)).all())
    torch.manual_seed(5)
    default = fake_quantize(x, row)
    torch.manual_seed(5)
    assert torch.equal(fake_quantize(x, row), default)


# Statistics


@pytest.mark.parametrize(
    ("operand", "decibels", "zeros"),
    [
        (Spec(), 20.4, 0.068),
        (Spec(axis=-2), 20.4, 0.068),
        (Spec(tile=True), 19.0, 0.10),
        (Spec(stochastic=True), 17.3, None),
        (Spec("mxfp8"), 31.5, 0.0),
    ],
    ids=["row", "column", "tile", "stochastic", "mxfp8"],
)
def test_normal_numbers_have_the_known_figures(operand: Spec, decibels: float, zeros: float | None) -> None:
    x = _normal(512, 1024)
    values = fake_quantize(x, operand, _generator())
    assert _sqnr(x, values) == pytest.approx(decibels, abs=0.15)
    if zeros is not None:
        assert _zeros(values) == pytest.approx(zeros, abs=0.02 if operand.tile else 0.003)


def test_tiles_flush_low_norm_rows() -> None:
    """The Super report's cause of zero gradients: a tile spans channels of high and of low norm."""
    w = _normal(512, 1024)
    w[torch.rand(512, generator=_generator(1)) < 0.3] *= 1e-2
    assert _zeros(fake_quantize(w, Spec())) == pytest.approx(0.068, abs=0.005)
    assert _zeros(fake_quantize(w, Spec(tile=True))) > 0.3


# Scaling


@pytest.mark.parametrize("name", ["row", "tile", "rotated", "stochastic", "wgrad_dy", "mxfp8"])
def test_powers_of_two_scale_through(name: str) -> None:
    """From 2^-66 (1e-20) to 2^20 (1e6): the values scale exactly, so nothing is lost that was there."""
    x = _normal(64, 96)
    one = fake_quantize(x, SPECS[name], _generator())
    for power in (-66, -40, -13, 7, 20):
        assert torch.equal(fake_quantize(x * 2.0**power, SPECS[name], _generator()), one * 2.0**power)


@pytest.mark.parametrize("factor", [1e-20, 1e-12, 1e-5, 3.7e-3, 1e3, 1e6])
def test_no_size_is_flushed(factor: float) -> None:
    x = _normal(128, 256) * factor
    for operand, decibels, zeros in (
        (Spec(), 20.4, 0.068),
        (Spec(tile=True), 19.0, 0.1),
        (Spec("mxfp8"), 31.5, 0),
    ):
        values = fake_quantize(x, operand)
        assert _sqnr(x.double() / factor, values.double() / factor) == pytest.approx(decibels, abs=0.4)
        assert _zeros(values) == pytest.approx(zeros, abs=0.02)
