"""The kernels on a GPU: the comparisons of tests/support/kernel_checks.py, also at model sizes."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_nemotron3.layers import conv, grouped, ssd
from megatron_nemotron3.layers.attention import TorchCoreAttention, _flash_packed
from megatron_nemotron3.precision.settings import gpu_kernels
from tests.layers.test_fewer_waits import check_flash_packed
from tests.precision.test_triton_grouped import check_rows, check_weights
from tests.support.gpu_world import attention_kernels, world
from tests.support.kernel_checks import (
    CONVOLUTIONS,
    SCANS,
    check_convolution,
    check_experts,
    check_grouped,
    check_scan,
)
from tests.support.models import hybrid_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: Head 64 and state 128 as in Nemotron 3; ragged last cell, documents inside cells and on their borders.
MODEL_SIZED = [
    (1, 200, 4, 64, 2, 128, [], False),
    (2, 150, 4, 64, 1, 128, [(0, 64), (0, 100), (1, 31), (1, 128)], True),
]
#: Factors of a term that are rounded to BF16, at most, by torch; mamba-ssm also rounds the states, their
#: gradients and its partial results.
TORCH_ROUNDINGS, MAMBA_SSM_ROUNDINGS = 2, 8


@pytest.fixture(autouse=True)
def only_on_gpu():
    """Products of the FP32 references and of plain torch are not rounded to TF32."""
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SCANS + MODEL_SIZED)
@pytest.mark.parametrize("strided", [False, True])
def test_scan(shape, dtype, strided):
    """Every scan that can run here."""
    forms = [(ssd.ssd_chunked, TORCH_ROUNDINGS)]
    if (kernel := ssd.mamba_ssm()) is not None and dtype in ssd.HALF and min(shape[3], shape[5]) >= 8:
        forms.append((kernel, MAMBA_SSM_ROUNDINGS))
    for form, roundings in forms:
        check_scan(form, shape, dtype=dtype, device="cuda", strided=strided, roundings=roundings)


#: x, B and C of a small Super behind z, 4 rows of 300 tokens.
MODEL_SIZED_CONVOLUTION = (4, 300, 6144, 4, 4096, 64, [(0, 64), (1, 100), (2, 299), (3, 1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [*CONVOLUTIONS, MODEL_SIZED_CONVOLUTION])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution(shape, dtype, activation):
    """With documents and without: causal-conv1d in 16 bits where it is installed, else torch."""
    for with_bias in (True, False):
        options = {"activation": activation, "with_bias": with_bias, "device": "cuda"}
        check_convolution(conv.causal_conv1d, shape, dtype=dtype, **options)


def test_causal_conv1d_is_used():
    x, taps = torch.zeros(1, 4, 8).cuda().bfloat16(), torch.zeros(8, 4).cuda().bfloat16()
    assert conv.library_computes(x, taps)
    if conv.library_kernel() is None:
        pytest.skip("causal-conv1d is not installed")
    y = conv.causal_conv1d(x.requires_grad_(), taps, None)
    assert "CausalConv1dFn" in type(y.grad_fn.next_functions[0][0]).__name__


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_grouped(together, as_tensor):
    """Odd counts; empty experts first, last and in between; model widths."""
    for counts in ([3, 0, 5, 1], [0, 7, 0, 130, 0], [1000, 3, 257]):
        check_grouped(counts, 1856, 1024, device="cuda", together=together, as_tensor=as_tensor)
    check_grouped([3, 4], 12, 8, device="cuda", together=together, as_tensor=as_tensor)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_experts(as_tensor, recompute):
    for counts in ([3, 0, 5, 1], [0, 7, 0, 130, 0], [1000, 3, 257]):
        check_experts(counts, 1856, 1024, device="cuda", as_tensor=as_tensor, recompute=recompute)


@pytest.mark.parametrize("borders", [[0, 70, 200], [0, 70, 150], [0, 128, 128, 199]])
def test_packed_attention(borders):
    """Flash attention of all documents with their borders on the device against one product a document, with
    2 KV heads; tokens after the last border form a document."""
    check_flash_packed(_flash_packed, borders, 200, heads=8, kv_heads=2, width=128, device="cuda")


@pytest.mark.parametrize("borders", [[0, 70, 200], [0, 70, 171, 200]])
def test_attention_of_documents_one_by_one(borders):
    """The same without library kernels; and no kernel that torch builds anew for every length."""
    with world("cuda"), gpu_kernels(False):
        config = hybrid_config("*", kv_channels=128)
        layer = TorchCoreAttention(config, 1, AttnMaskType.causal, "self")

        def form(q, k, v, borders, scale):
            packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
            return layer(q, k, v, packed_seq_params=packed).view_as(q)

        with attention_kernels() as kernels:
            check_flash_packed(form, borders, 200, heads=8, kv_heads=2, width=128, device="cuda")
    assert kernels and not any("cudnn" in name for name in kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_emulated_experts(dtype):
    for counts in ([3, 0, 5, 1], [0, 7, 0, 130, 0], [1000, 3, 257]):
        check_rows(counts, 1856, 1024, dtype, device="cuda")
        check_rows(counts, 1024, 1856, dtype, device="cuda", transposed=True, scaled=False)
        check_weights(counts, 1856, 1024, dtype, device="cuda", gap=13)


def test_torch_has_a_grouped_product():
    x, w = torch.zeros(4, 8).cuda().bfloat16(), torch.zeros(8, 8).cuda().bfloat16()
    assert grouped.grouped_mm_works(x, [w])
