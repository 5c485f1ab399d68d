"""The torch backend's choice of kernels on CUDA, mamba-ssm with our signature, and grouped products."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from megatron_nemotron3.layers import grouped, ssd
from tests.layers.test_ssd import (
    make_documents,
    make_inputs,
    scan,
)
from tests.support.kernel_checks import SCANS, check_experts, check_grouped, check_scan


def reference_mamba_ssm(seen):
    """A stand-in for `mamba_ssm.ops.triton.ssd_combined` with its signature (v2.2.2 to v2.3.2), its rule for
    initial states and its result dtypes; computes with `ssd_reference` and records its arguments."""

    def mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=None,
        z=None,
        dt_bias=None,
        initial_states=None,
        seq_idx=None,
        cu_seqlens=None,
        dt_softplus=False,
        dt_limit=(0.0, float("inf")),
        return_final_states=False,
        return_varlen_states=False,
    ):
        bound = inspect.currentframe().f_locals
        seen.append({k: v for k, v in bound.items() if k != "seen"})
        if seq_idx is not None and initial_states is not None:
            of_first = (seq_idx[:, 0] == 0).to(initial_states.dtype)
            initial_states = initial_states * of_first[:, None, None, None]
        options = {"D": D, "initial_state": initial_states, "seq_idx": seq_idx}
        y, state = ssd.ssd_reference(x, dt, A, B, C, **options, return_final_state=True)
        return (y, state.float()) if return_final_states else y

    return SimpleNamespace(mamba_chunk_scan_combined=mamba_chunk_scan_combined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba_ssm_adapter(dtype):
    """Same result as the reference, with documents that do not start at 0; and the kernel's arguments."""
    seen = []
    form = ssd.mamba_ssm_scan(reference_mamba_ssm(seen))
    for shape in SCANS:
        check_scan(form, shape, dtype=dtype)
    inputs = make_inputs(2, 20, 2, 3, 1, 4, dtype=dtype)
    seq_idx = make_documents(2, 20, [(0, 7)]) + 5
    want = scan(ssd.ssd_reference, inputs, seq_idx, return_final_state=True)
    got = scan(form, inputs, seq_idx, return_final_state=True, chunk_size=256)
    torch.testing.assert_close(got, want)
    last = seen[-1]
    assert last["seq_idx"].tolist() == [[0] * 7 + [1] * 13, [0] * 20]
    assert last["seq_idx"].dtype == torch.int32 and last["seq_idx"].is_contiguous()
    assert last["chunk_size"] == 256 and last["return_final_states"] is True
    assert last["dt_softplus"] is False and last["dt_bias"] is None and last["z"] is None
    for name in ("dt", "A", "D", "initial_states"):
        assert last[name].dtype == torch.float32, name
    for name in ("x", "B", "C"):
        assert last[name].dtype == dtype, name
    assert isinstance(scan(form, inputs), torch.Tensor)
    with pytest.raises(ValueError, match="dt has shape"):
        scan(form, inputs | {"dt": inputs["dt"][:, 1:]})


def test_mamba_ssm_signature():
    """Against the installed package, if there is one."""
    module = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined", reason="mamba-ssm is not installed")
    fake = inspect.signature(reference_mamba_ssm([]).mamba_chunk_scan_combined)
    real = inspect.signature(module.mamba_chunk_scan_combined)
    assert list(real.parameters)[: len(fake.parameters)] == list(fake.parameters)


def test_choice(monkeypatch):
    """By device and dtype, among the scans that can be imported; plain torch is the last choice."""
    fake = ssd.mamba_ssm_scan(reference_mamba_ssm([]))
    for mamba, names in (
        (fake, ["mamba-ssm Triton SSD", "torch chunked SSD", "torch chunked SSD"]),
        (None, ["torch chunked SSD"] * 3),
    ):
        monkeypatch.setattr(ssd, "_installed_mamba_ssm", lambda mamba=mamba: mamba)
        ssd.cuda_scans.cache_clear()
        dtypes = (torch.bfloat16, torch.float32, torch.float64)
        on_gpu = [SimpleNamespace(is_cuda=True, dtype=dtype) for dtype in dtypes]
        assert [ssd.select_scan(x).name for x in on_gpu] == names
        assert ssd.select_scan(torch.zeros(1)).name == "torch chunked SSD"
    ssd.cuda_scans.cache_clear()


def test_broken_mamba_ssm_is_passed_over(monkeypatch):
    def broken(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(ssd.importlib, "import_module", broken)
    assert ssd._installed_mamba_ssm() is None


# The grouped product: torch has it on the CPU, too


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_grouped_linear(together, as_tensor):
    check_grouped([3, 0, 5, 1], 16, 8, together=together, as_tensor=as_tensor)
    check_grouped([0, 4], 8, 24, together=together, as_tensor=as_tensor)
    check_grouped([6], 8, 8, together=together, as_tensor=as_tensor)


@pytest.mark.parametrize("counts, out, width", [([2, 3], 12, 8), ([2, 3], 8, 9), ([0, 0], 8, 8)])
def test_grouped_falls_back(counts, out, width, monkeypatch):
    """For unaligned widths, FP32 and inputs without rows, the loop over experts computes the result."""

    def refuse(*args, **kwargs):
        raise AssertionError("torch's grouped product must not be called")

    monkeypatch.setattr(grouped, "grouped_mm", refuse)
    check_grouped(counts, out, width)
    check_grouped(counts, out, width, as_tensor=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 4, 0], [6]])
def test_experts(counts, as_tensor, recompute):
    """FC1, activation and FC2 in grouped products: values and gradients against FP64."""
    check_experts(counts, 16, 8, as_tensor=as_tensor, recompute=recompute)


@pytest.mark.parametrize("counts, width, latent", [([2, 3], 12, 8), ([0, 0], 16, 8)])
def test_experts_fall_back(counts, width, latent, monkeypatch):
    """Unaligned widths, and a rank without tokens."""

    def refuse(*args, **kwargs):
        raise AssertionError("torch's grouped product must not be called")

    monkeypatch.setattr(grouped, "grouped_mm", refuse)
    check_experts(counts, width, latent, as_tensor=True)


def test_frozen_experts_get_no_gradient():
    x = torch.randn(5, 8).bfloat16().requires_grad_()
    probs = torch.rand(5).requires_grad_()
    fc1, fc2 = [torch.randn(16, 8).bfloat16()], [torch.randn(8, 16).bfloat16()]
    y = grouped.squared_relu_experts_cuda(x, probs, fc1, fc2, [5])
    y.float().sum().backward()
    assert x.grad is not None and probs.grad is not None


def test_grouped_problems():
    x, w = torch.zeros(4, 8).bfloat16(), torch.zeros(8, 8).bfloat16()
    assert grouped.grouped_mm_problem(x, [w]) is None
    assert "torch.float32" in grouped.grouped_mm_problem(x.float(), [w.float()])
    assert "width 12 is not a multiple of 8" in grouped.grouped_mm_problem(x, [w.new_zeros(12, 8)])
    assert "1025 local experts" in grouped.grouped_mm_problem(x, [w] * 1025)
    with pytest.raises(
        ValueError, match="counts of 2 experts add up to 5, but there are 1 weights and 4 rows"
    ):
        grouped.grouped_linear_cuda(x, [w], [2, 3])


def test_matrices_are_stacked_without_a_copy_where_they_can_be():
    weights = [torch.nn.Parameter(torch.randn(8, 16).bfloat16()) for _ in range(3)]
    values = [w.detach().clone() for w in weights]
    want = torch.stack(values)
    copy = grouped.stacked(weights)
    assert torch.equal(copy, want) and copy.data_ptr() != weights[0].data_ptr()

    together = grouped.one_allocation(weights)
    assert all(isinstance(w, torch.nn.Parameter) and torch.equal(w, v) for w, v in zip(weights, values))
    view = grouped.stacked(weights)
    assert torch.equal(view, want) and view.data_ptr() == together.data_ptr() == weights[0].data_ptr()
    assert grouped.stacked(weights[1:]).data_ptr() == weights[1].data_ptr()
    assert grouped.stacked(weights[:1]).data_ptr() == weights[0].data_ptr()

    # Equal gaps as in a padded buffer are fine; falling addresses, uneven or unaligned gaps are not.
    def cut(starts):
        buffer = torch.randn(1000).bfloat16()
        return [buffer[i : i + 128].view(8, 16) for i in starts]

    cases = {
        (0, 192, 384): True,
        (384, 192, 0): False,
        (0, 128, 384): False,
        (0, 132, 264): False,
        (0, 64, 128): False,
        (4, 132, 260): False,
    }
    for starts, is_view in cases.items():
        weights = cut(starts)
        result = grouped.stacked(weights)
        assert torch.equal(result, torch.stack(weights))
        assert (result.data_ptr() == weights[0].data_ptr()) == is_view, starts
