"""Training's quantizers against TransformerEngine's own reference, byte by byte.

golden/make_nvfp4_reference.py wrote the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from megatron_nemotron3.precision import quantizer
from megatron_nemotron3.precision.numerics import e4m3
from megatron_nemotron3.precision.recipe import Spec
from tests.support.packed_operand import PackedOperand, quantize

GOLDEN = Path(__file__).parent.parent / "golden" / "nvfp4_training.npz"
CASES = (
    *("normal", "float16", "float32", "spread", "tall", "holes", "outlier", "ties", "order", "zeros"),
    *("smallest", "tiny", "subnormal", "below", "huge", "infinite", "low_amax", "high_amax"),
)
KINDS = {
    "row": Spec(),
    "column": Spec(axis=-2),
    "tile_row": Spec(tile=True),
    "tile_column": Spec(tile=True, axis=-2),
    "rotated": Spec(axis=-2, hadamard=True),
}
DEVICES = pytest.mark.parametrize(
    "device", ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
)


@pytest.fixture(scope="module")
def golden() -> dict[str, numpy.ndarray]:
    with numpy.load(GOLDEN) as file:
        return dict(file)


def _input(
    golden: dict[str, numpy.ndarray], case: str, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.from_numpy(golden[f"{case}.x"]).view(getattr(torch, str(golden[f"{case}.dtype"])))
    given = golden.get(f"{case}.given")
    return x.to(device), None if given is None else torch.tensor(given, device=device)


def test_the_file_has_these_cases(golden) -> None:
    assert {key.split(".")[0] for key in golden} == set(CASES)
    assert sum(key.endswith(".codes") for key in golden) == len(CASES) * len(KINDS) - 2


@DEVICES
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_transformer_engines(golden, case: str, device: str) -> None:
    """And the values, with and without the scale of the tensor, are the codes decoded."""
    x, given = _input(golden, case, device)
    for kind, spec in KINDS.items():
        name, made = f"{case}.{kind}", quantize(x, spec, amax=given)
        assert made.amax is not None
        if f"{name}.codes" in golden:
            assert made.amax.cpu().numpy().tobytes() == golden[f"{name}.amax"].tobytes()
            assert numpy.array_equal(made.scales.cpu().numpy(), golden[f"{name}.scales"])
            assert numpy.array_equal(made.codes.cpu().numpy(), golden[f"{name}.codes"])
        else:
            assert case in ("huge", "infinite") and spec.hadamard  # their sums overflow
        for dtype in (torch.float32, torch.bfloat16):
            fast = quantizer.fake_quantize(x, spec, amax=given, dtype=dtype)
            assert torch.allclose(fast, made.dequantize(dtype), rtol=0, atol=0, equal_nan=True)
            assert fast.dtype == dtype and fast.shape == x.shape
        units = quantizer.units(x, spec, amax=given)
        assert torch.equal(units.amax, made.amax)
        ones = PackedOperand(made.codes, made.scales, torch.tensor(2688.0, device=device), spec)
        assert torch.equal(units.values.float(), ones.dequantize())  # exact in the dtype of x, FP16 too


def test_the_cases_reach_the_corners(golden) -> None:
    """Zero, subnormal and largest scales, every code, and an amax below which S is FLT_MAX."""
    scales = golden["spread.row.scales"]
    assert {0, 1, 2, 3, 4, 5, 7, 126} <= set(scales.ravel().tolist())
    assert set(golden["low_amax.row.scales"].ravel().tolist()) == {e4m3.encode(torch.tensor(448.0)).item()}
    codes = golden["ties.row.codes"]
    assert set((codes & 15).ravel().tolist()) | set((codes >> 4).ravel().tolist()) == set(range(16))
    assert 0 < golden["below.row.amax"] < 7.9e-36
    assert golden["huge.row.amax"] == numpy.finfo(numpy.float32).max
    assert golden["infinite.row.amax"] == numpy.inf


def test_the_order_of_multiplications_decides_a_scale(golden) -> None:
    """What TransformerEngine <= 2.13 computed has other bytes: the golden file would notice."""
    x, _ = _input(golden, "order", "cpu")
    block = x.float().unflatten(1, (-1, 16)).abs().amax(2)
    older = e4m3.encode((block / 6) * (torch.tensor(2688.0) / block.amax()))
    assert (older.numpy() != golden["order.row.scales"]).sum() == 17
    # and so would another way to divide 2688 by amax, somewhere in these tensors
    differs = 0
    for case in CASES:
        amax = torch.from_numpy(golden[f"{case}.row.amax"])
        differs += bool(2688.0 / amax != torch.tensor(2688.0) / amax)
    assert differs
