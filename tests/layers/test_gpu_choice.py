"""The torch backend's choice of kernels on CUDA, mamba-ssm and causal-conv1d with our signatures, and grouped
products."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from megatron_nemotron3.layers import conv, grouped, ssd
from megatron_nemotron3.precision.settings import gpu_kernels
from tests.layers.test_ssd import (
    make_documents,
    make_inputs,
    scan,
)
from tests.support.kernel_checks import (
    CONVOLUTIONS,
    SCANS,
    check_convolution,
    check_experts,
    check_grouped,
    check_scan,
)
from tests.support.references import causal_conv1d_reference
from tests.support.world import world_of_one


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
    inputs["D"] = torch.stack([inputs["D"], inputs["D"]], -1)[:, 0]
    seq_idx = make_documents(2, 20, [(0, 7)]) + 5
    want = scan(ssd.ssd_reference, inputs, seq_idx, return_final_state=True)
    got = scan(form, inputs, seq_idx, return_final_state=True, chunk_size=256)
    torch.testing.assert_close(got, want)
    last = seen[-1]
    assert last["seq_idx"].tolist() == [[0] * 7 + [1] * 13, [0] * 20]
    assert last["seq_idx"].dtype == torch.int32 and last["seq_idx"].is_contiguous()
    assert last["chunk_size"] == 256 and last["return_final_states"] is True
    assert last["D"].is_contiguous()  # its backward asserts this
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
    for installed in (fake, None):
        monkeypatch.setattr(ssd, "mamba_ssm", lambda installed=installed: installed)
        dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        on_gpu = [SimpleNamespace(is_cuda=True, dtype=dtype) for dtype in dtypes]
        half = installed or ssd.ssd_chunked
        assert [ssd.select_scan(x) for x in on_gpu] == [half, half, ssd.ssd_chunked, ssd.ssd_chunked]
        assert ssd.select_scan(torch.zeros(1)) is ssd.ssd_chunked
        assert ssd.select_scan(torch.zeros(1).bfloat16()) is ssd.ssd_chunked


def test_broken_mamba_ssm_is_passed_over(monkeypatch):
    def broken(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(ssd.importlib, "import_module", broken)
    assert ssd.mamba_ssm.__wrapped__() is None


class CompiledConvolution(torch.autograd.Function):
    """Stands in for `CausalConv1dFn` of causal-conv1d (v1.4.0 to v1.7.0): checks what its C++ checks, and
    what its kernels rely on without a check; computes with the definition, into the memory it allocates."""

    @staticmethod
    def check(x, weight, bias, seq_idx):
        b, c, s = x.shape
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        assert weight.shape[0] == c and 2 <= weight.shape[1] <= 4 and weight.dim() == 2
        assert c % 8 == 0
        CompiledConvolution.check_strides(x)
        if bias is not None:
            assert bias.dtype == weight.dtype and bias.stride(-1) == 1 and bias.shape == (c,)
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and seq_idx.shape == (b, s)
            assert seq_idx.min() >= 0  # padding since v1.5.3

    @staticmethod
    def check_strides(t):
        b, _, s = t.shape
        assert t.stride(1) == 1 and t.stride(2) > 1  # channels last, which documents need
        assert t.stride(2) % 8 == 0 and t.stride(0) % 8 == 0
        assert t.data_ptr() % 16 == 0  # vectors of 16 bytes
        assert b * t.stride(0) < 2**32 and s * t.stride(2) < 2**32  # uint32_t

    @staticmethod
    def compute(x, weight, bias, seq_idx, activation):
        options = {"activation": activation, "seq_idx": seq_idx}
        return causal_conv1d_reference(x.transpose(1, 2), weight, bias, **options).transpose(1, 2)

    @staticmethod
    def forward(ctx, x, weight, bias, seq_idx, activation):
        CompiledConvolution.check(x, weight, bias, seq_idx)
        ctx.save_for_backward(x, weight, bias, seq_idx)
        ctx.activation = activation
        out = torch.empty_like(x)
        CompiledConvolution.check_strides(out)
        return out.copy_(CompiledConvolution.compute(x, weight, bias, seq_idx, activation))

    @staticmethod
    def backward(ctx, dout):
        x, weight, bias, seq_idx = ctx.saved_tensors
        assert not (x.stride(1) == 1 and dout.stride(1) != 1)  # else it copies
        CompiledConvolution.check_strides(dout)
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        with torch.enable_grad():
            given = leaves if bias is not None else [*leaves, None]
            y = CompiledConvolution.compute(*given, seq_idx, ctx.activation)
        dx, *rest = torch.autograd.grad(y, leaves, dout)
        placed = torch.empty_like(x)
        assert placed.stride(1) == 1
        return placed.copy_(dx), rest[0], rest[1] if bias is not None else None, None, None


def compiled_convolution(seen):
    def causal_conv1d_fn(
        x,
        weight,
        bias=None,
        seq_idx=None,
        initial_states=None,
        return_final_states=False,
        final_states_out=None,
        activation=None,
    ):
        assert activation in (None, "silu", "swish")
        assert initial_states is None and not return_final_states and final_states_out is None
        seen.append(x)
        return CompiledConvolution.apply(x, weight, bias, seq_idx, activation)

    return causal_conv1d_fn


@pytest.fixture
def given_to_the_library(monkeypatch):
    """x as the stand-in for causal-conv1d gets it, where a GPU would use it."""
    seen = []
    monkeypatch.setattr(conv, "library_computes", lambda x, taps: True)
    monkeypatch.setattr(conv, "library_kernel", lambda: compiled_convolution(seen))
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_causal_conv1d(shape, dtype, given_to_the_library):
    """Values and gradients; x is read where it lies if the kernel can read it there."""
    for activation, with_bias in (("silu", True), ("swish", False), (None, True)):
        check_convolution(conv.causal_conv1d, shape, dtype=dtype, activation=activation, with_bias=with_bias)
    assert len(given_to_the_library) == 3
    b, _, c, _, before, behind, _ = shape
    width = before + c + behind
    in_place = width % 8 == 0 and before % 8 == 0
    assert given_to_the_library[-1].stride(2) == (b * width if in_place else c)


def test_causal_conv1d_gets_no_offset_over_32_bits(given_to_the_library, monkeypatch):
    b, s, c, _, before, behind, _ = CONVOLUTIONS[1]
    monkeypatch.setattr(conv, "LIBRARY_ELEMENTS", s * b * (before + c + behind))
    check_convolution(conv.causal_conv1d, CONVOLUTIONS[1], dtype=torch.bfloat16)
    assert given_to_the_library[-1].stride(2) == c
    x = torch.zeros(2, 1, 8).bfloat16().expand(2, 5, 8)  # every token at the same address
    conv.causal_conv1d(x, torch.zeros(8, 4).bfloat16(), None)
    assert given_to_the_library[-1].stride(2) == 8


def test_what_causal_conv1d_computes():
    def computes(c=8, k=4, *, dtype=torch.bfloat16, is_cuda=True, elements=64):
        x = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, numel=lambda: elements)
        return conv.library_computes(x, torch.zeros(c, k))

    assert computes() and computes(dtype=torch.float16) and computes(k=2)
    assert not computes(dtype=torch.float32) and not computes(dtype=torch.float64)
    assert not computes(12) and not computes(k=5) and not computes(k=1)
    assert not computes(is_cuda=False) and not computes(elements=2**32)
    with gpu_kernels(False):
        assert not computes()
    torch.use_deterministic_algorithms(True)
    try:
        assert not computes()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("missing", [None, "causal_conv1d", "causal_conv1d_cuda", "compiled"])
def test_where_causal_conv1d_is_found(missing, monkeypatch):
    """Not without its compiled module, nor with one that is empty."""
    found = {
        "causal_conv1d": SimpleNamespace(causal_conv1d_fn=len),
        "causal_conv1d_cuda": SimpleNamespace(causal_conv1d_fwd=len),
    }
    if missing == "compiled":
        found["causal_conv1d_cuda"] = SimpleNamespace()

    def imported(name):
        if name == missing:
            raise ImportError(name)
        return found[name]

    monkeypatch.setattr(ssd.importlib, "import_module", imported)
    assert conv.library_kernel.__wrapped__() is (None if missing else len)


def test_causal_conv1d_signature():
    """Against the installed package, if there is one."""
    module = pytest.importorskip("causal_conv1d", reason="causal-conv1d is not installed")
    fake, real = (inspect.signature(f) for f in (compiled_convolution([]), module.causal_conv1d_fn))
    assert list(real.parameters) == list(fake.parameters)


@pytest.fixture
def small_world():
    with world_of_one():
        yield


def test_mixer_with_causal_conv1d(given_to_the_library, monkeypatch, small_world):
    """The gradient of x lands among those of z, B, C and dt; packed documents; no copy of x."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_nemotron3.specs import nemotron3_torch_stack_spec
    from tests.support.models import build_hybrid

    half = {"bf16": True, "params_dtype": torch.bfloat16}
    mixer = build_hybrid("M", nemotron3_torch_stack_spec, **half).decoder.layers[0].mixer
    borders = torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    torch.manual_seed(3)
    hidden, dy = (torch.randn(40, 1, 64).bfloat16() for _ in range(2))

    def run():
        x = hidden.clone().requires_grad_()
        y, _ = mixer(x, packed_seq_params=packed)
        return [y, *torch.autograd.grad(y, [x, *mixer.parameters()], dy)]

    found = run()
    assert len(given_to_the_library) == 1
    assert given_to_the_library[0].stride(2) == mixer.in_proj.weight.shape[0]
    monkeypatch.setattr(conv, "library_computes", lambda x, taps: False)
    for a, b in zip(found, run(), strict=True):
        assert (a - b).float().norm() <= 0.02 * b.float().norm()


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
    assert grouped.grouped_mm_works(x, [w])
    assert not grouped.grouped_mm_works(x.float(), [w.float()])
    assert not grouped.grouped_mm_works(x, [w.new_zeros(12, 8)])
    assert not grouped.grouped_mm_works(x, [w] * 1025)
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
