"""Opt-in: the quantizers against the libraries themselves, live, on larger tensors than the golden file's.

TE_PYTHON=…          an interpreter with TransformerEngine >= 2.19
TORCHAO_SITE=…       pip install --no-deps --target SITE torchao==0.18.0
FOUROVERSIX_SITE=…   the same with SKIP_CUDA_BUILD=1, --no-build-isolation and fouroversix==1.0.5
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TENSORS = """
import torch
from megatron_nemotron3.precision.numerics import e4m3
from megatron_nemotron3.precision import quantizer
from megatron_nemotron3.precision.quantizer import fake_quantize
from megatron_nemotron3.precision.recipe import Spec
from tests.support.packed_operand import quantize

def tensors(sizes, types=(torch.bfloat16, torch.float32)):
    for seed in range(12):
        for size in sizes:
            for dtype in types:
                generator = torch.Generator().manual_seed(seed)
                x = torch.randn(128, 256, generator=generator) * size
                shape = ((1, 1), (128, 1), (1, 256))[seed % 3]
                x = x * torch.exp2(-torch.randint(0, 30, shape, generator=generator).float())
                if seed % 2:
                    x[16:32, 32:96] = 0
                yield x.to(dtype)
"""

TE = """
from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils
checked = 0
for x in tensors((1e-30, 1e-8, 0.01, 1, 1e4, 1e30)):
    for tile, rotate in ((False, False), (True, False), (False, True)):
        made = reference_nvfp4.NVFP4QuantizerRef(
            reference_utils.Fp4Formats.E2M1, quant_tile_shape=(16 if tile else 1, 16), with_rht=rotate
        ).quantize(x)
        sides = [(-2, made.data_t, made.scale_t, made.global_amax_col)]
        if not rotate:
            sides.append((-1, made.data, made.scale, made.global_amax_row))
        for axis, codes, scales, amax in sides:
            ours = quantize(x, Spec(axis=axis, tile=tile, hadamard=rotate))
            assert torch.equal(ours.amax, amax.view(()))
            assert torch.equal(ours.scales, scales.view(torch.uint8))
            # The order in which 16 products are summed in FP32 belongs to the matrix library: a rotated
            # element within that error of a halfway point may go either way.
            assert (ours.codes != codes).sum() <= 2 * rotate
            checked += 1
    for tile in (False, True):
        made = reference_nvfp4.NVFP4QuantizerRef(
            reference_utils.Fp4Formats.E2M1,
            quant_tile_shape=(16 if tile else 1, 16),
            nvfp4_use_4over6=True,
            nvfp4_e4m3_max=256,
        ).quantize(x)
        ours = quantize(x, Spec(tile=tile, four_over_six=True))
        assert torch.equal(ours.scales, made.scale.view(torch.uint8))
        assert torch.equal(ours.codes, made.data)
print("checked", checked)
"""

TORCHAO = """
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
checked = 0
for x in tensors((1e-36, 1e-30, 1e-3, 1, 1e30)):
    made = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    ours = quantize(x, Spec("mxfp8"))
    assert torch.equal(ours.scales, made.scale.view(torch.uint8))
    assert torch.equal(ours.codes, made.qdata.view(torch.uint8))
    assert torch.equal(fake_quantize(x, Spec("mxfp8"), dtype=torch.float32), made.dequantize(torch.float32))
    checked += 1
# NVFP4: torchao divides where TransformerEngine multiplies by a reciprocal: nearly equal is all there is.
for seed in range(8):
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
    made = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.float().abs().max()))
    ours = quantize(x, Spec())
    assert (ours.scales != made.scale.view(torch.uint8).view(ours.scales.shape)).double().mean() < 0.01
    assert (ours.codes != made.qdata.view(ours.codes.shape)).double().mean() < 0.005
    checked += 1
print("checked", checked)
"""

FOUROVERSIX = """
from fouroversix import dequantize, QuantizationConfig, QuantizeBackend, ScaleRule, quantize_to_fp4
checked = 0
for x in tensors((1e-8, 0.01, 1, 1e4), (torch.bfloat16,)):
    for tile in (False, True):
        config = QuantizationConfig(
            backend=QuantizeBackend.pytorch, scale_rule=ScaleRule.static_6, block_scale_2d=tile
        )
        made = quantize_to_fp4(x, config)
        ours = quantize(x, Spec(tile=tile))
        values = fake_quantize(x, Spec(tile=tile), dtype=torch.float32)
        theirs = dequantize(made, torch.float32, intermediate_dtype=torch.float32)
        # fouroversix 1.0.5 divides by 6 first, as TransformerEngine <= 2.13 did: blocks whose scale depends
        # on that are left out. So are subnormal scales, where it makes -0 of elements above 7 and
        # TransformerEngine 6.
        amax = x.float().abs().view(8, 16, 16, 16) if tile else x.float().abs().view(128, 1, 16, 16)
        amax = amax.amax((1, 3)).repeat_interleave(16 if tile else 1, 0)
        older = e4m3.encode(amax / 6 * (torch.tensor(2688.0) / amax.max()))
        same = ((older == ours.scales) & (ours.scales >= 8)).repeat_interleave(16, 1)
        # Equal but for the order of the last two multiplications.
        assert torch.allclose(values[same], theirs[same], rtol=3e-7, atol=0)
        assert (older != ours.scales).double().mean() < 0.02 and same.any()
        checked += 1
print("checked", checked)
"""


def _run(python: str, script: str, *site: str) -> None:
    path = os.pathsep.join((*site, str(ROOT)))
    done = subprocess.run(
        [python, "-W", "ignore", "-c", TENSORS + script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("checked")[-1]) > 60


@pytest.mark.te
def test_every_byte_is_transformer_engines() -> None:
    python = os.environ.get("TE_PYTHON")
    if not python:
        pytest.skip("TE_PYTHON names no interpreter with TransformerEngine")
    _run(python, TE)


@pytest.mark.parametrize(
    ("variable", "script"),
    [("TORCHAO_SITE", TORCHAO), ("FOUROVERSIX_SITE", FOUROVERSIX)],
    ids=["torchao", "fouroversix"],
)
def test_a_second_library_agrees(variable: str, script: str) -> None:
    site = os.environ.get(variable)
    if not site:
        pytest.skip(f"{variable} names no folder with the library")
    _run(sys.executable, script, site)
