"""The kernels on a GPU: the comparisons of tests/layers/test_triton.py, also at model sizes."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.layers import grouped_gpu, scan_kernels
from megatron_nemotron3.layers.attention import _flash_packed
from megatron_nemotron3.precision.settings import gpu_kernels
from tests.layers.test_fewer_waits import check_flash_packed
from tests.layers.test_ssd import make_documents, make_inputs, scan
from tests.layers.test_triton import SCANS, check_activation, check_experts, check_grouped, check_scan
from tests.precision.test_triton_grouped import check_rows, check_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: Head 64 and state 128 as in Nemotron 3; ragged last cell, documents inside cells and on their borders.
MODEL_SIZED = [
    (1, 200, 4, 64, 2, 128, [], False),
    (2, 150, 4, 64, 1, 128, [(0, 64), (0, 100), (1, 31), (1, 128)], True),
]
#: Where factors of a term are rounded to BF16: at most twice by our kernels; mamba-ssm also rounds the
#: states, their gradients and its partial results.
ROUNDINGS = {"Triton chunked SSD": 2, "torch chunked SSD": 2, "mamba-ssm Triton SSD": 8}


@pytest.fixture(autouse=True)
def only_on_gpu():
    """Products of the FP32 references and of plain torch are not rounded to TF32."""
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SCANS + MODEL_SIZED)
@pytest.mark.parametrize("strided", [False, True])
def test_scan(shape, dtype, strided):
    """Every scan that can run here."""
    for form in scan_kernels.cuda_scans():
        if dtype in form.dtypes and not (form.name.startswith("mamba-ssm") and min(shape[3], shape[5]) < 8):
            roundings = ROUNDINGS[form.name]
            check_scan(form, shape, dtype=dtype, device="cuda", strided=strided, roundings=roundings)


def test_our_scan_is_there_and_deterministic():
    """Repeated runs are bitwise equal: no sum depends on the order in which programs finish."""
    form = next(form for form in scan_kernels.cuda_scans() if form.name == "Triton chunked SSD")
    inputs = make_inputs(2, 300, 8, 64, 2, 128, dtype=torch.bfloat16)
    inputs = {k: v.detach().cuda().requires_grad_() for k, v in inputs.items()}
    seq_idx = make_documents(2, 300, [(0, 100), (1, 64)]).cuda()
    runs = []
    for _ in range(3):
        y, state = scan(form, inputs, seq_idx, return_final_state=True)
        runs.append([y, state, *torch.autograd.grad(y.sum() + state.sum(), list(inputs.values()))])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("p", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths_fit_the_device(p, n, dtype):
    """Every width our kernels accept runs, forward and backward."""
    from megatron_nemotron3.layers.triton_scan import ssd_triton, unsupported

    inputs = make_inputs(1, 70, 2, p, 1, n, dtype=dtype)
    if unsupported(inputs["x"], inputs["B"]):
        assert p * n > 128 * 128
        return
    check_scan(ssd_triton, (1, 70, 2, p, 1, n, [], True), dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, width", [(0, 8), (1, 1), (5, 16), (300, 37), (1000, 1856), (100, 2688)])
def test_activation(rows, width, dtype):
    from megatron_nemotron3.layers import triton_activation

    check_activation(triton_activation.weighted_squared_relu, rows, width, dtype, device="cuda")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_grouped(together, as_tensor):
    """Odd counts; empty experts first, last and in between; model widths."""
    for counts in ([3, 0, 5, 1], [0, 7, 0, 130, 0], [1000, 3, 257]):
        check_grouped(counts, 1856, 1024, device="cuda", together=together, as_tensor=as_tensor)
    check_grouped([3, 4], 12, 8, device="cuda", together=together, as_tensor=as_tensor)


@pytest.mark.parametrize("kernels", [None, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_experts(as_tensor, recompute, kernels):
    """With the activation of torch and with ours."""
    with gpu_kernels(kernels):
        for counts in ([3, 0, 5, 1], [0, 7, 0, 130, 0], [1000, 3, 257]):
            check_experts(counts, 1856, 1024, device="cuda", as_tensor=as_tensor, recompute=recompute)


@pytest.mark.parametrize("borders", [[0, 70, 200], [0, 70, 150], [0, 128, 128, 199]])
def test_packed_attention(borders):
    """Flash attention of all documents with their borders on the device against one product a document, with
    2 KV heads; tokens after the last border form a document."""
    check_flash_packed(_flash_packed, borders, 200, heads=8, kv_heads=2, width=128, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_emulated_experts(dtype):
    for counts in ([3, 0, 5, 1], [0, 7, 0, 130, 0], [1000, 3, 257]):
        check_rows(counts, 1856, 1024, dtype, device="cuda")
        check_rows(counts, 1024, 1856, dtype, device="cuda", transposed=True, scaled=False)
        check_weights(counts, 1856, 1024, dtype, device="cuda", gap=13)


def test_torch_has_a_grouped_product():
    x, w = torch.zeros(4, 8).cuda().bfloat16(), torch.zeros(8, 8).cuda().bfloat16()
    assert grouped_gpu.grouped_mm_problem(x, [w]) is None
