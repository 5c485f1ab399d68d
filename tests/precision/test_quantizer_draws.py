"""Stochastic rounding in Triton: its random numbers. test_triton_quantize.py runs this in the interpreter.

The rule itself, given torch's numbers, is compared there.
"""

from __future__ import annotations

import numpy
import pytest
import torch

from megatron_nemotron3.precision import quantizer
from megatron_nemotron3.precision.quantizer import fake_quantize
from megatron_nemotron3.precision.recipe import Spec
from tests.precision.test_triton_quantize import INTERPRETED, SPECS, path, same, seeded, values


def check_replay(name: str, device: str = "cpu") -> None:
    """The generator's state decides, torch's own where none is given; every call draws anew."""
    from megatron_nemotron3.precision import triton_quantize

    x, how = values(16, 128, device=device), SPECS[name]
    with path(triton_quantize):
        generator = seeded(device)
        first, second = fake_quantize(x, how, generator), fake_quantize(x, how, generator)
        state = generator.get_state()
        third = fake_quantize(x, how, generator)
        generator.set_state(state)
        assert torch.equal(fake_quantize(x, how, generator), third)
        torch.manual_seed(0)
        assert torch.equal(fake_quantize(x, how), first)
    for one, two in ((first, second), (second, third), (first, third)):
        assert 0.05 < (one != two).double().mean() < 0.6


def philox(key: int, counters: numpy.ndarray) -> numpy.ndarray:
    """Philox4x32-10 (Random123, SC11), written anew: uint64 [n] -> eight int16 numbers each, [n, 8]."""
    low = numpy.uint64(0xFFFFFFFF)
    k0, k1 = numpy.uint64(key & 0xFFFFFFFF), numpy.uint64(key >> 32 & 0xFFFFFFFF)
    c0, c1 = counters & low, counters >> numpy.uint64(32)
    c2 = c3 = numpy.zeros_like(counters)
    for _ in range(10):
        a, b = numpy.uint64(0xD2511F53) * c0, numpy.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = b >> numpy.uint64(32) ^ c1 ^ k0, b & low, a >> numpy.uint64(32) ^ c3 ^ k1, a & low
        k0, k1 = k0 + numpy.uint64(0x9E3779B9) & low, k1 + numpy.uint64(0xBB67AE85) & low
    words = numpy.stack([c0, c1, c2, c3], 1).astype(numpy.uint32)
    return numpy.stack([words & 0xFFFF, words >> 16], 2).astype(numpy.uint16).view(numpy.int16).reshape(-1, 8)


def test_philox_is_the_published_one():
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(0, numpy.zeros(1, numpy.uint64)).view(numpy.uint32).tolist() == [known]


def check_numbers(axis: int, shape: tuple[int, ...], device: str = "cpu") -> None:
    """Which half of which word rounds which element, to the last bit; every number is odd."""
    from megatron_nemotron3.precision import triton_quantize

    how, x = Spec(axis=axis, stochastic=True), values(*shape, device=device)
    prepared = quantizer.prepare(x, how)
    arguments = prepared.x, how, prepared.block_amax, prepared.amax
    generator = seeded(device, 7)
    found = triton_quantize.finish(*arguments, torch.empty_like(x), generator=generator)
    key = torch.empty(1, dtype=torch.int64, device=device).random_(
        -(2**63), None, generator=seeded(device, 7)
    )
    if axis == -2:  # two draws for each column of a group
        drawn = philox(key.item(), numpy.arange(x.numel() // 8, dtype=numpy.uint64))
        drawn = drawn.reshape(-1, shape[-1], 16).swapaxes(1, 2)
    else:  # a draw for one element in each of the eight parts of a program
        part = 16 * triton_quantize.ROWS["finish"]
        programs = -(-x.numel() // (8 * part))
        drawn = philox(key.item(), numpy.arange(programs * part, dtype=numpy.uint64))
        drawn = drawn.reshape(-1, part, 8).swapaxes(1, 2)
    bits = torch.from_numpy(drawn.reshape(-1)[: x.numel()] | 1).view(x.shape).to(device)
    wanted = triton_quantize.finish(*arguments, torch.empty_like(x), bits=bits)
    assert same(found, wanted)
    assert not same(wanted, triton_quantize.finish(*arguments, torch.empty_like(x), bits=bits.roll(1, -1)))


def check_draws(axis: int, count: int, device: str = "cpu") -> None:
    """The mean of `count` blocks is x, and all elements are drawn independently."""
    from megatron_nemotron3.precision import triton_quantize

    # 6 makes the scale of the block 1, and stays. The others lie at known distances above a value.
    block = torch.tensor([6, 0.01, 0.1, 0.24, 0.26, 0.4, 0.49, 0.7, 0.9, 1.2, 1.7, 2.1, 2.5, 3.3, 4.2, 5.5])
    spacing = torch.tensor([0.5] * 11 + [1] * 3 + [2] * 2)
    block[::2] *= -1
    x = block.repeat(count, 1).to(device)  # [count, 16]
    if axis == -2:
        x = x.view(-1, 1024, 16).mT.contiguous()
    with path(triton_quantize):
        drawn = fake_quantize(x, Spec(axis=axis, stochastic=True), seeded(device))
    drawn, x = (t.mT.reshape(-1, 16) if axis == -2 else t for t in (drawn.cpu().double(), x.cpu().double()))
    errors = drawn - x
    assert (errors[:, 0] == 0).all() and (errors.abs() < spacing).all()
    # Probabilities have 15 bits.
    assert (errors.mean(0).abs() <= 5 * errors.std(0) / count**0.5 + spacing * 2.0**-15).all()
    noise = errors[:, 1:] / errors[:, 1:].std(0)
    for apart in (0, 1, 2, 8, 16, 64):  # blocks
        correlation = noise.t() @ noise.roll(apart, 0) / count
        if apart == 0:
            assert (correlation.diagonal() - 1).abs().max() < 0.1
            correlation.fill_diagonal_(0)
        assert correlation.abs().max() < 5.5 / count**0.5, apart


if INTERPRETED:
    from megatron_nemotron3.precision import triton_quantize

    pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

    @pytest.fixture(autouse=True)
    def small_programs(monkeypatch):
        monkeypatch.setitem(triton_quantize.ROWS, "finish", 64)
        monkeypatch.setitem(triton_quantize.COLUMNS, "stochastic", 512)

    @pytest.mark.parametrize("name", ["stochastic", "wgrad_dy"])
    def test_interpreted_replay(name):
        check_replay(name)

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_interpreted_numbers(axis):
        check_numbers(axis, (2, 48, 80))

    def test_interpreted_last_bits(monkeypatch):
        """They decide once in 2^16 times: a million elements, in two programs."""
        monkeypatch.setitem(triton_quantize.ROWS, "finish", 4096)
        check_numbers(-1, (64, 16384))

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_interpreted_draws(axis):
        check_draws(axis, 4096)
