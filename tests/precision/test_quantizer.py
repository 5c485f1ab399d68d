"""What the quantizers promise beyond bytes: identities, whose amax counts, corners, and what they refuse."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.precision import blocks, quantizer
from megatron_nemotron3.precision.quantizer import fake_quantize, units
from megatron_nemotron3.precision.recipe import BLOCK, Spec
from megatron_nemotron3.precision.scales import nvfp4_steps, product_scale
from tests.support.packed_operand import PUBLISHED, quantize

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = {
    "row": Spec(),
    "column": Spec(axis=-2),
    "tile": Spec(tile=True),
    "rotated": Spec(axis=-2, hadamard=True),
    "rotated_row": Spec(hadamard=True),
    "stochastic": Spec(stochastic=True),
    "wgrad_dy": PUBLISHED.wgrad[0],
    "mxfp8": Spec("mxfp8"),
    "mxfp8_column": Spec("mxfp8", axis=-2),
}
EVERY_SPEC = pytest.mark.parametrize("name", SPECS)


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sqnr(x: torch.Tensor, values: torch.Tensor) -> float:
    return 10 * torch.log10(x.double().square().sum() / (values - x).double().square().sum()).item()


def _zeros(x: torch.Tensor) -> float:
    return (x == 0).double().mean().item()


# The two forms agree


@EVERY_SPEC
@settings(max_examples=40)
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
    x = _normal(*lead, 32 * groups, 32 * columns, seed=seed) * 2.0**power
    x = (x * torch.exp2(-torch.randint(0, 12, x.shape, generator=_generator(seed)).float())).to(dtype)
    before = x.clone()
    fast = fake_quantize(x, SPECS[name], _generator(seed), dtype=torch.float32)
    slow = quantize(x, SPECS[name], _generator(seed)).dequantize()
    assert torch.equal(fast, slow)
    assert torch.equal(x, before)
    assert torch.equal(fake_quantize(x, SPECS[name], _generator(seed)), slow.to(dtype))


@EVERY_SPEC
@pytest.mark.parametrize("piece", [16, 1000, 4096])
def test_pieces_change_nothing(name: str, piece: int, monkeypatch) -> None:
    x = _normal(2, 96, 160)
    whole = fake_quantize(x, SPECS[name], _generator())
    monkeypatch.setattr(blocks, "PIECE", piece)
    assert torch.equal(fake_quantize(x, SPECS[name], _generator()), whole)


def test_threads_change_nothing() -> None:
    x, threads = _normal(1024, 1024), torch.get_num_threads()
    try:
        made = []
        for count in (1, 2):
            torch.set_num_threads(count)
            made.append([fake_quantize(x, s, _generator()) for s in SPECS.values()])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*made))


@EVERY_SPEC
def test_any_layout_in_memory_gives_the_same(name: str) -> None:
    x = _normal(64, 96)
    assert torch.equal(
        fake_quantize(x.t().contiguous().t(), SPECS[name], _generator()),
        fake_quantize(x, SPECS[name], _generator()),
    )
    assert not fake_quantize(x.requires_grad_(), SPECS[name]).requires_grad


# Axes and tiles


def test_the_column_axis_is_the_row_axis_of_the_transpose() -> None:
    x = _normal(64, 96)
    for hadamard_, stochastic in ((False, False), (True, False)):
        column = Spec(axis=-2, hadamard=hadamard_, stochastic=stochastic)
        row = Spec(hadamard=hadamard_, stochastic=stochastic)
        assert torch.equal(fake_quantize(x, column), fake_quantize(x.t(), row).t())
    assert torch.equal(fake_quantize(x, SPECS["mxfp8_column"]), fake_quantize(x.t(), SPECS["mxfp8"]).t())


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    dtype=st.sampled_from(TYPES),
)
def test_a_tiled_weight_is_the_same_transposed(
    seed: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    w = (_normal(16 * rows, 16 * columns, seed=seed) * torch.exp2(_normal(16 * rows, 1, seed=seed) * 3)).to(
        dtype
    )
    tile = Spec(tile=True)
    assert torch.equal(fake_quantize(w, tile).t(), fake_quantize(w.t(), tile))
    by_row, by_column = quantize(w, tile), quantize(w, Spec(tile=True, axis=-2))
    assert torch.equal(by_row.dequantize(), by_column.dequantize())
    again = quantize(w.t(), tile)
    assert torch.equal(by_column.codes, again.codes) and torch.equal(by_column.scales, again.scales)


def test_rows_and_columns_quantize_a_weight_differently_without_tiles() -> None:
    """Otherwise the identity above would say nothing."""
    w = _normal(256, 256)
    differ = (fake_quantize(w, Spec()) != fake_quantize(w, Spec(axis=-2))).double().mean().item()
    assert differ > 0.6


# The amax


def test_an_amax_from_outside_is_that_of_the_whole() -> None:
    """Tensor-parallel ranks that agree on the largest magnitude quantize their parts of one tensor."""
    x = _normal(64, 128) * torch.exp2(_normal(1, 128) * 2)
    for name in ("row", "tile", "rotated"):
        whole = units(x, SPECS[name])
        parts = [units(part.contiguous(), SPECS[name], amax=whole.amax) for part in x.split(64, 1)]
        assert torch.equal(torch.cat([p.values for p in parts], 1), whole.values)
        alone = [units(part.contiguous(), SPECS[name]) for part in x.split(64, 1)]
        assert not torch.equal(torch.cat([p.values for p in alone], 1), whole.values)


def test_a_function_can_reduce_the_amax() -> None:
    x, seen = _normal(32, 48), []

    def reduce(block_amax: torch.Tensor) -> torch.Tensor:
        seen.append(block_amax)
        return block_amax.amax() * 3

    made = units(x, Spec(axis=-2), amax=reduce)
    assert list(seen[0].shape) == [2, 48] == blocks.grid_shape(x, Spec(axis=-2))
    assert made.amax == x.abs().max() * 3
    assert torch.equal(made.values, units(x, Spec(axis=-2), amax=x.abs().max() * 3).values)


@pytest.mark.parametrize("name", ["row", "column", "tile", "rotated"])
def test_experts_that_share_a_tensor_have_scales_of_their_own(name: str) -> None:
    x = _normal(3, 32, 48) * torch.tensor([1e-4, 1.0, 30.0])[:, None, None]
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
    for part, values in zip(tokens.split(rows), made.split(rows)):
        assert torch.equal(values, fake_quantize(part, SPECS[name]))


# Products


@pytest.mark.parametrize("dtype", TYPES)
def test_units_are_exact_and_their_product_is_the_product_of_the_values(dtype: torch.dtype) -> None:
    x, w = _normal(64, 128).to(dtype), (_normal(96, 128, seed=1) * 0.02).to(dtype)
    a, b = units(x, PUBLISHED.fprop[0]), units(w, PUBLISHED.fprop[1])
    assert a.values.dtype == dtype
    for made, source, operand in ((a, x, PUBLISHED.fprop[0]), (b, w, PUBLISHED.fprop[1])):
        assert made.values.abs().max() <= 2688
        exact = units(source, operand, dtype=torch.float32).values
        assert torch.equal(made.values.float(), exact)
    product = (a.values.float() @ b.values.float().t()) * product_scale(a.amax, b.amax)
    dequantized = [
        fake_quantize(t, s, dtype=torch.float32)
        for t, s in ((x, PUBLISHED.fprop[0]), (w, PUBLISHED.fprop[1]))
    ]
    exact = dequantized[0].double() @ dequantized[1].double().t()
    assert _sqnr(exact, product) > 120


def test_a_step_is_multiplied_in_transformer_engines_order() -> None:
    block = torch.arange(1.0, 449.0).repeat(20)
    amax = _normal(len(block)).abs()
    one = numpy.float32(1 / 2688)
    expected = (block.numpy() * amax.numpy()) * one
    assert numpy.array_equal(nvfp4_steps(block, amax).numpy(), expected)
    assert (block.numpy() * (amax.numpy() * one) != expected).any()


def test_the_recipe_is_the_published_one() -> None:
    assert PUBLISHED.fprop[0] == Spec() and PUBLISHED.fprop[1] == Spec(tile=True)
    assert PUBLISHED.dgrad[0] == Spec(stochastic=True)
    assert PUBLISHED.wgrad[1] == Spec(axis=-2, hadamard=True)
    assert PUBLISHED.wgrad[0] == Spec(axis=-2, hadamard=True, stochastic=True)
    assert BLOCK == {"nvfp4": 16, "mxfp8": 32}


# Corners


@EVERY_SPEC
def test_zeros_and_nothing(name: str) -> None:
    for dtype in TYPES:
        zeros = torch.zeros(32, 64, dtype=dtype)
        assert torch.equal(fake_quantize(zeros, SPECS[name]), zeros)
        assert not torch.signbit(fake_quantize(-zeros, SPECS[name])).any()
    for shape in ((0, 64), (3, 0, 32)):
        nothing = torch.zeros(shape)
        assert fake_quantize(nothing, SPECS[name]).shape == shape
        assert quantize(nothing, SPECS[name]).dequantize().shape == shape


@EVERY_SPEC
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_not_finite(name: str, bad: float) -> None:
    """Emulation must not hide an overflow: Megatron skips the step when a gradient is not finite."""
    x = _normal(32, 64)
    x[5, 7] = bad
    values = fake_quantize(x, SPECS[name], _generator())
    assert not values[5, 7].isfinite()
    if bad is torch.nan and SPECS[name].format == "nvfp4":
        assert bool(values.isnan().all())
    if SPECS[name].format == "mxfp8":
        assert (~values.isfinite()).sum() == 32  # its block


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "mxfp4"}, "format 'mxfp4' is unknown: use one of nvfp4, mxfp8"),
        ({"axis": 0}, "blocks along axis 0 are not supported: use -1 or -2"),
        ({"format": "mxfp8", "stochastic": True}, "MXFP8 has no stochastic"),
        ({"format": "mxfp8", "tile": True, "hadamard": True}, "MXFP8 has no tile or hadamard"),
        ({"tile": True, "hadamard": True}, "use tile or hadamard, not both"),
    ],
)
def test_operands_that_nobody_has_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(**arguments)


@pytest.mark.parametrize(
    ("x", "operand", "message"),
    [
        (
            torch.zeros(4, 24),
            Spec(),
            r"axis -1 of \[4, 24\] is not divisible by the nvfp4 block of 16: pad it",
        ),
        (torch.zeros(24, 16), Spec(axis=-2), r"axis -2 of \[24, 16\] is not divisible"),
        (torch.zeros(24, 16), Spec(tile=True), r"axis -2 of \[24, 16\] is not divisible"),
        (torch.zeros(4, 48), Spec("mxfp8"), "not divisible by the mxfp8 block of 32"),
        (torch.zeros(16), Spec(), r"shape \[16\] has 1 axes: 2 or more"),
        (torch.zeros(16, 16, dtype=torch.float64), Spec(), "torch.float64 cannot be quantized"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(x: torch.Tensor, operand: Spec, message: str) -> None:
    for function in (fake_quantize, quantize):
        with pytest.raises(ValueError, match=message):
            function(x, operand)


def test_mxfp8_has_no_scale_of_the_tensor() -> None:
    x = torch.zeros(32, 32)
    with pytest.raises(ValueError, match="MXFP8 has no scale for the whole tensor: leave amax out"):
        fake_quantize(x, Spec("mxfp8"), amax=torch.tensor(1.0))
    with pytest.raises(ValueError, match="mxfp8 has no scale for the whole tensor: use fake_quantize"):
        units(x, Spec("mxfp8"))
    assert quantize(x, Spec("mxfp8")).amax is None
    assert quantizer.units(x, Spec()).amax is not None
