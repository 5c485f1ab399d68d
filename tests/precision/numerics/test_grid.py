"""Rounding in place against encoding and decoding, and stochastic rounding against its definition."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.precision.numerics import e2m1, e4m3
from megatron_nemotron3.precision.numerics.grid import E2M1, E4M3, ValueGrid, draw

FORMATS = pytest.mark.parametrize(("grid", "codes"), [(E2M1, e2m1), (E4M3, e4m3)], ids=["e2m1", "e4m3"])


def _values(grid: ValueGrid) -> torch.Tensor:
    """All values from -max to max, ascending, zero once."""
    bits = torch.arange(8 if grid is E2M1 else 127, dtype=torch.uint8)
    values = (e2m1 if grid is E2M1 else e4m3).decode(bits)
    return torch.cat((-values[1:].flip(0), values))


def _numbers() -> torch.Tensor:
    """FP32 numbers of every exponent, and every multiple of small powers of two that can be a tie."""
    bits = torch.arange(-(1 << 31), 1 << 31, 4999, dtype=torch.int64).to(torch.int32).view(torch.float32)
    ties = [torch.arange(-4096, 4096) * 2.0**-power for power in (0, 3, 6, 10, 12)]
    numbers = torch.cat((bits, *ties, torch.tensor([0.0, -0.0, torch.inf, -torch.inf])))
    return numbers[~numbers.isnan()]


@FORMATS
def test_rounding_in_place_is_encoding_and_decoding(grid: ValueGrid, codes) -> None:
    x = _numbers()
    assert torch.equal(grid.round_(x.clone(), torch.empty_like(x)), codes.decode(codes.encode(x)))
    nan = torch.tensor([torch.nan, -torch.nan])
    assert bool(grid.round_(nan, torch.empty(2)).isnan().all())


def _draw(grid: ValueGrid, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    x = x.clone()
    bits = draw(torch.empty(x.numel() // 2), generator)
    return grid.round_stochastic_(x, torch.empty_like(x), torch.empty_like(x), bits)


@FORMATS
def test_stochastic_rounding_picks_one_of_two_neighbors_and_leaves_values(grid: ValueGrid, codes) -> None:
    values, generator = _values(grid), torch.Generator().manual_seed(1)
    x = torch.empty(1 << 14).uniform_(-grid.max, grid.max, generator=generator)
    x[:4096] *= 2.0 ** -torch.arange(4096).remainder(20)
    upper = torch.searchsorted(values, x)
    lower = torch.searchsorted(values, x, right=True) - 1
    for _ in range(20):
        drawn = _draw(grid, x, generator)
        assert bool(((drawn == values[lower]) | (drawn == values[upper])).all())
    every = values.repeat(64)[: len(values) * 64 // 4 * 4]
    for _ in range(50):
        assert torch.equal(_draw(grid, every, generator), every)


@FORMATS
def test_stochastic_rounding_saturates(grid: ValueGrid, codes) -> None:
    x = torch.tensor([1.07, -1.07, 3.0, torch.inf]) * grid.max
    limit = torch.tensor([1.0, -1.0, 1.0, 1.0]) * grid.max
    for seed in range(20):
        assert torch.equal(_draw(grid, x, torch.Generator().manual_seed(seed)), limit)


@pytest.mark.full
@FORMATS
def test_the_chance_of_the_upper_neighbor_is_the_distance_to_the_lower(grid: ValueGrid, codes) -> None:
    """Six points of every gap, both signs: within five standard errors of that many draws."""
    draws = 400_000 if grid is E2M1 else 20_000
    values = _values(grid)
    values = values[values >= 0]
    generator = torch.Generator().manual_seed(2)
    for sign in (1, -1):
        for share in (0.01, 0.125, 0.25, 0.5, 0.77, 0.99):
            low, gap = values[:-1], values.diff()
            x = (low + share * gap) * sign
            up = torch.zeros(len(x))
            for _ in range(10):
                drawn = _draw(grid, x.expand(draws // 10, -1).contiguous(), generator)
                up += (drawn.abs() > low).sum(0)
            error = (share * (1 - share) / draws) ** 0.5
            assert bool(((up / draws - share).abs() < 5 * error + 2.0**-16).all())
