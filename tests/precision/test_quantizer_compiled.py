"""The compiled passes of fake quantization against the plain ones, on the CPU; tests/gpu has the same checks.

The plain form is the specification. Equal means bit for bit, NaN where NaN is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from megatron_nemotron3.precision import blocks, quantizer
from megatron_nemotron3.precision.quantizer import fake_quantize, units
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.settings import gpu_kernels
from tests.support.packed_operand import PUBLISHED

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = {
    "row": Spec(),
    "column": Spec(axis=-2),
    "tile": Spec(tile=True),
    "tile_column": Spec(tile=True, axis=-2),
    "rotated": Spec(axis=-2, hadamard=True),
    "rotated_row": Spec(hadamard=True),
    "stochastic": Spec(stochastic=True),
    "wgrad_dy": PUBLISHED.wgrad[0],
    "mxfp8": Spec("mxfp8"),
    "mxfp8_column": Spec("mxfp8", axis=-2),
}
EVERY_SPEC = pytest.mark.parametrize("name", SPECS)


@contextmanager
def path(compiled: bool) -> Iterator[None]:
    """The quantizer runs its compiled passes, or the plain ones."""

    def form(function: object, x: torch.Tensor) -> object:
        return quantizer._compiled(function) if compiled else function

    with mock.patch.object(quantizer, "_form", form):
        yield


def on_cpu_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are not cut, memory is new, and nothing is compiled yet."""
    torch._dynamo.reset()
    monkeypatch.setattr(blocks, "pieces", lambda *views: iter((views,)))
    monkeypatch.setattr(blocks, "scratch", lambda like, _: torch.empty_like(like, dtype=torch.float32))


def seeded(device: str, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit, signs of zeros too; any NaN is as good as another."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    a, b = (t.masked_fill(t.isnan(), torch.nan).contiguous() for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integers), b.view(integers))


def check(x: torch.Tensor, how: Spec, *, dtype=None, amax=None, form=fake_quantize, seed: int = 0) -> None:
    """Compiled against plain, with the same random numbers."""
    before, results = x.clone(), []
    for compiled in (False, True):
        with path(compiled):
            results.append(form(x, how, seeded(x.device.type, seed), amax, dtype=dtype))
    wanted, found = results
    if form is units:
        assert same(found.amax, wanted.amax)
        found, wanted = found.values, wanted.values
    different = (found != wanted) & ~(found.isnan() & wanted.isnan())
    assert same(found, wanted), f"{int(different.sum())} of {x.numel()} differ"
    assert same(x, before)


def values(*shape: int, device: str = "cpu", dtype=torch.float32) -> torch.Tensor:
    """Normal numbers of many sizes, a tenth zero; of 16 x 16 tiles some nearly or wholly underflow."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(-torch.randint(0, 12, shape, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    rows = x.view(-1, shape[-1])
    sizes = torch.tensor([1, 1, 1, 2.0**-12, 2.0**-20, -0.0])
    tiles = sizes[torch.randint(6, (len(rows) // 16 + 1, shape[-1] // 16 + 1), generator=generator)]
    rows *= tiles.repeat_interleave(16, 0).repeat_interleave(16, 1)[: len(rows), : shape[-1]]
    rows[0, 0] = 4
    return x.to(device, dtype)


def check_spec(name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str = "cpu") -> None:
    """The values in the dtype of x; of BF16 in FP32, too, NVFP4 without the scale of the tensor."""
    how = SPECS[name]
    x = values(*shape, device=device, dtype=dtype)
    check(x, how)
    if dtype == torch.bfloat16:
        form = fake_quantize if how.format == "mxfp8" else units
        check(x.mT.contiguous().mT, how, form=form, dtype=torch.float32)
    elif dtype == torch.float32 and how.format == "nvfp4":
        check(x, how, form=units, dtype=torch.bfloat16)


def ties(found: torch.Tensor) -> torch.Tensor:
    """Times its largest magnitude an amax that puts a block's scale between two E4M3 numbers: the last bit of
    each step decides."""
    return 448 / (8.5 + torch.arange(found.numel(), device=found.device) % 7).view_as(found)


#: An amax that is given, and one that is made of the block grid.
AMAX = {
    "given": lambda found: torch.tensor(3.0, device=found.device),
    "tensor": lambda found: found.amax() * 1.5,
    "matrix": lambda found: found.amax((1, 2), keepdim=True),
    "row": lambda found: found.amax(2, keepdim=True),
    "column": lambda found: found.amax((0, 1)),
    "ties": lambda found: found * ties(found),
}


def check_amax(name: str, kind: str, device: str = "cpu") -> None:
    x = values(2, 16, 96, device=device) * torch.tensor([1.0, 40.0], device=device)[:, None, None]
    amax = AMAX[kind]
    check(x, SPECS[name], amax=amax(x) if kind == "given" else amax)


#: Amax 0, infinite, NaN; S at FLT_MAX; scales that underflow; the largest numbers.
CORNERS = {
    "zeros": 0.0,
    "negative zeros": -0.0,
    "smallest": 2.0**-149,
    "subnormal": 1e-40,
    "below S = FLT_MAX": 7.8e-36,
    "above S = FLT_MAX": 8.0e-36,
    "exponent -127": 448 * 2.0**-127,
    "large": 3e38,
    "inf": torch.inf,
    "-inf": -torch.inf,
    "nan": torch.nan,
}


def check_corners(name: str, device: str = "cpu") -> None:
    """One such number among normal ones, or as the largest."""
    for number in CORNERS.values():
        x = values(SPECS[name].block, 32, device=device).clamp_(-1, 1)
        if abs(number) < 1:
            x *= number
        x[5, 7] = number
        check(x, SPECS[name])


def check_every_exponent(name: str, device: str = "cpu") -> None:
    """Random bit patterns: blocks of any size next to each other. MXFP8: every BF16 number."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 64), generator=generator, dtype=torch.int32)
    # Blocks whose elements have one exponent: few of them vanish.
    exponents = torch.randint(0, 255, (2, 2), generator=generator, dtype=torch.int32)
    exponents = exponents.repeat_interleave(32, 0).repeat_interleave(32, 1)
    x = ((bits & -0x7F800001) | exponents << 23).view(torch.float32)
    check(x.to(device), SPECS[name])
    check(x.to(device), SPECS[name], dtype=torch.bfloat16)
    if SPECS[name].format == "mxfp8":
        every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        every = every.view(512, 128)[:: 1 if device != "cpu" else 16]
        check(every.to(device).contiguous(), SPECS[name])


def check_replay(name: str, device: str = "cpu") -> None:
    """The generator's state decides, torch's own where none is given; every call draws anew."""
    x, how = values(16, 128, device=device), SPECS[name]
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


def check_draws(axis: int, count: int, device: str = "cpu") -> None:
    """The mean of `count` blocks is x, and all elements are drawn independently."""
    # 6 makes the scale of the block 1, and stays. The others lie at known distances above a value.
    block = torch.tensor([6, 0.01, 0.1, 0.24, 0.26, 0.4, 0.49, 0.7, 0.9, 1.2, 1.7, 2.1, 2.5, 3.3, 4.2, 5.5])
    spacing = torch.tensor([0.5] * 11 + [1] * 3 + [2] * 2)
    block[::2] *= -1
    x = block.repeat(count, 1).to(device)  # [count, 16]
    if axis == -2:
        x = x.view(-1, 1024, 16).mT.contiguous()
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


@pytest.mark.parametrize("name", ["stochastic", "wgrad_dy"])
def test_replay(name):
    check_replay(name)


@pytest.mark.parametrize("axis", [-1, -2])
def test_draws(axis):
    check_draws(axis, 4096)


# On the CPU's backend of torch.compile

on_inductor = pytest.mark.filterwarnings("ignore::UserWarning")


@on_inductor
@pytest.mark.full
@EVERY_SPEC
def test_compiled(name, monkeypatch):
    on_cpu_as_on_gpu(monkeypatch)
    check_spec(name, torch.bfloat16, (2, SPECS[name].block, 96))
    made = counters["stats"]["unique_graphs"]
    assert made > 0
    check_spec(name, torch.bfloat16, (544, 1344))
    assert counters["stats"]["unique_graphs"] == made  # one form for all sizes


@on_inductor
@pytest.mark.full
@EVERY_SPEC
def test_compiled_corners(name, monkeypatch):
    on_cpu_as_on_gpu(monkeypatch)
    for dtype in (torch.float32, torch.float16):
        check_spec(name, dtype, (3, 64, 160))
    check_corners(name)
    check_every_exponent(name)


@on_inductor
@pytest.mark.full
@pytest.mark.parametrize("name", ["row", "column", "tile"])
def test_compiled_amax(name, monkeypatch):
    on_cpu_as_on_gpu(monkeypatch)
    for kind in AMAX:
        check_amax(name, kind)
    if name == "column":
        for columns in (4, 37, 1028):
            check(values(64, columns), SPECS[name])


# The choice


def test_compiled_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(quantizer, "_exact_on", lambda device: device == "exact")

    def compiled(is_cuda: bool, device: str = "exact") -> bool:
        return quantizer._form(quantizer._round, SimpleNamespace(is_cuda=is_cuda, device=device)) is not (
            quantizer._round
        )

    with gpu_kernels(False):
        assert not compiled(True)
    with gpu_kernels(True):
        assert compiled(True) and not compiled(True, "inexact") and not compiled(False)


@on_inductor
@pytest.mark.full
def test_a_device_that_is_exact(monkeypatch, capsys):
    on_cpu_as_on_gpu(monkeypatch)
    assert quantizer._exact_on.__wrapped__(torch.device("cpu")) and capsys.readouterr().out == ""


def test_a_device_that_is_not(monkeypatch, capsys):
    """A compiler that contracts a product and a sum, or that fails, is not used, and a warning says so."""
    tried, device = quantizer._exact_on.__wrapped__, torch.device("cpu")
    on_cpu_as_on_gpu(monkeypatch)

    def contracted(grid, source, target, encode, decode, bits):
        product = source.double() * encode.double()
        power = torch.exp2(product.float().log2().floor()).clamp(grid.smallest, grid.largest).double()
        push = 1.5 * 2.0 ** (23 - grid.mantissa) * power
        target.copy_(((product + push).float() - push.float()) * decode)

    others = {quantizer._round: contracted}
    monkeypatch.setattr(quantizer, "_compiled", lambda function: others.get(function, function))
    assert not tried(device) and "it rounds otherwise than torch" in capsys.readouterr().out
    monkeypatch.setattr(quantizer, "_compiled", lambda function: 1 / 0)
    assert not tried(device) and "warning: quantizers run without torch.compile" in capsys.readouterr().out
