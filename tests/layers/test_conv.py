"""The blocked causal convolution against its reference: values, gradients, documents, memory.

Tolerance. The reference runs in FP64 on the same (already rounded) inputs. Before the activation a value is
a sum of k + 1 terms: off by at most (k + 2) eps * sum |terms|. SiLU has slope <= 1.1 and curvature <= 0.5, so
its gradient is off by at most (k + 8) eps * |dy| (1.1 + sum |terms|). Weight and bias gradients add b * s
such terms, input gradients k. sum |terms| is what the convolution gives for absolute values. Results in a
narrower dtype are rounded once more, eps(dtype) * |value|.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.layers import conv
from tests.support.references import causal_conv1d_reference

NAMES = ("x", "weight", "bias")


def make_inputs(b, s, c, k, *, dtype=torch.float32, seed=0, with_bias=True):
    torch.manual_seed(seed)
    inputs = {
        "x": torch.randn(b, s, c, dtype=dtype),
        "weight": torch.randn(c, 1, k, dtype=dtype),
        "bias": torch.randn(c, dtype=dtype) if with_bias else None,
    }
    return {name: None if v is None else v.requires_grad_() for name, v in inputs.items()}


def make_documents(b, s, borders):
    starts = torch.zeros(b, s, dtype=torch.int32)
    for row, position in borders:
        starts[row % b, position % s] = 1
    return starts.cumsum(1)


def convolve(form, inputs, **options):
    return form(inputs["x"], inputs["weight"], inputs["bias"], **options)


def values_and_gradients(form, inputs, dy, **options):
    y = convolve(form, inputs, **options)
    leaves = {name: v for name, v in inputs.items() if v is not None}
    loss = (y.to(dy.dtype) * dy).sum()
    return {"y": y} | dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def check_against_reference(inputs, seq_idx, activation, seed=1, form=conv.causal_conv1d):
    torch.manual_seed(seed)
    x, k = inputs["x"], inputs["weight"].shape[-1]
    b, s, _ = x.shape
    dy = torch.randn_like(x)
    options = {"seq_idx": seq_idx, "activation": activation}
    got = values_and_gradients(form, inputs, dy, **options)
    exact = {n: None if v is None else v.detach().double().requires_grad_() for n, v in inputs.items()}
    reference = causal_conv1d_reference
    want = values_and_gradients(reference, exact, dy.double(), **options)

    absolute = {n: None if v is None else v.detach().abs().requires_grad_() for n, v in exact.items()}
    options["activation"] = None
    terms = convolve(reference, absolute, **options)
    slope = dy.double().abs() * (1.1 + terms.detach())
    size = values_and_gradients(reference, absolute, slope, **options)
    added = {"weight": b * s, "bias": b * s}
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    for name, value in want.items():
        assert got[name].dtype == x.dtype
        m = added.get(name, k) + k + 8
        limit = torch.finfo(x.dtype).eps * value.abs() + m * eps * 1.1 * size[name].abs()
        limit += torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps / 2  # of subnormal results
        assert ((got[name].double() - value).abs() <= limit).all(), name


@settings(max_examples=40)
@given(
    s=st.integers(1, 40),
    b=st.integers(1, 3),
    c=st.integers(1, 6) | st.just(16),
    k=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    activation=st.sampled_from(["silu", None]),
    borders=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=12),
    block=st.sampled_from([1, 32, 2**18]),
    with_bias=st.booleans(),
    cutting=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_fast_is_the_reference(s, b, c, k, dtype, activation, borders, block, with_bias, cutting, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(conv.BLOCK_ELEMENTS, "cpu", block)
        patch.setattr(conv, "CUTTING", {"cpu"} if cutting else {})
        inputs = make_inputs(b, s, c, k, dtype=dtype, seed=seed, with_bias=with_bias)
        check_against_reference(inputs, make_documents(b, s, borders) if borders else None, activation)


@pytest.mark.parametrize("s", [63, 64, 65, 150])
def test_at_the_default_block_border(s):
    """2048 channels: 64 tokens a block."""
    assert conv.BLOCK_ELEMENTS["cpu"] // 2048 == 64
    check_against_reference(make_inputs(1, s, 2048, 4), None, "silu")


def test_formula_written_out():
    inputs = {n: v.detach() for n, v in make_inputs(2, 6, 3, 4, dtype=torch.float64).items()}
    seq_idx = make_documents(2, 6, [(0, 1), (0, 2), (1, 5)])
    for form in (conv.causal_conv1d, causal_conv1d_reference):
        y = convolve(form, inputs, seq_idx=seq_idx)
        for row in range(2):
            for t in range(6):
                value = inputs["bias"].clone()
                for lag in range(4):
                    tap = inputs["weight"][:, 0, 3 - lag]
                    if t - lag >= 0 and seq_idx[row, t - lag] == seq_idx[row, t]:
                        value += tap * inputs["x"][row, t - lag]
                torch.testing.assert_close(y[row, t], value * torch.sigmoid(value))


def test_against_torch_conv1d():
    """An independent implementation: grouped conv1d with padding on the left."""
    inputs = make_inputs(2, 50, 8, 4)
    got = convolve(conv.causal_conv1d, inputs)
    padded = torch.nn.functional.pad(inputs["x"].transpose(1, 2), (3, 0))
    want = torch.nn.functional.conv1d(padded, inputs["weight"], inputs["bias"], groups=8).transpose(1, 2)
    torch.testing.assert_close(got, torch.nn.functional.silu(want))


@pytest.mark.parametrize("cutting", [{"cpu"}, {}], ids=["pieces", "masks"])
def test_documents_do_not_leak(monkeypatch, cutting):
    """Not even a NaN of another document has an effect, and no gradient reaches it."""
    monkeypatch.setattr(conv, "CUTTING", cutting)
    inputs = make_inputs(1, 12, 3, 4)
    seq_idx = make_documents(1, 12, [(0, 4), (0, 5), (0, 9)])
    clean = convolve(conv.causal_conv1d, inputs, seq_idx=seq_idx)
    gradient = torch.autograd.grad(clean[:, 5:9].sum(), inputs["x"])[0]
    assert torch.count_nonzero(gradient[:, :5]) == 0
    assert torch.count_nonzero(gradient[:, 9:]) == 0
    with torch.no_grad():
        inputs["x"][:, 4] = torch.nan
    spoilt = convolve(conv.causal_conv1d, inputs, seq_idx=seq_idx)
    keep = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert torch.equal(spoilt[:, keep], clean[:, keep])


@pytest.mark.parametrize("documents", ["none", "pieces", "masks"])
@pytest.mark.parametrize("block", [2, 2**18])
def test_gradcheck(monkeypatch, documents, block):
    monkeypatch.setitem(conv.BLOCK_ELEMENTS, "cpu", block)
    monkeypatch.setattr(conv, "CUTTING", {} if documents == "masks" else {"cpu"})
    inputs = make_inputs(2, 7, 2, 3, dtype=torch.float64)
    seq_idx = make_documents(2, 7, [(0, 2), (1, 3), (1, 4)]) if documents != "none" else None

    def function(*tensors):
        given = dict(zip(NAMES, tensors, strict=True))
        return convolve(conv.causal_conv1d, given, seq_idx=seq_idx)

    assert torch.autograd.gradcheck(function, tuple(inputs.values()))


def test_strided_input():
    """A slice of a wider, transposed projection, as the mixer has it, equals its contiguous copy."""
    wide = torch.randn(30, 2, 12, requires_grad=True)
    inputs = make_inputs(2, 30, 5, 4)
    results = []
    for x in (wide.transpose(0, 1)[..., 4:9], wide.transpose(0, 1)[..., 4:9].contiguous()):
        y = convolve(conv.causal_conv1d, inputs | {"x": x})
        results.append((y, torch.autograd.grad(y.square().sum(), wide)[0]))
    torch.testing.assert_close(results[0], results[1])


def test_saves_inputs_only():
    inputs = make_inputs(1, 64, 8, 4, dtype=torch.bfloat16)
    saved = []

    def pack(t):
        saved.append(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        convolve(conv.causal_conv1d, inputs)
    assert set(saved) <= {v.data_ptr() for v in inputs.values()}


@pytest.mark.parametrize("form", [conv.causal_conv1d, causal_conv1d_reference])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 1, 4)}, r"weight \(4, 1, 4\).*c=3"),
        ({"bias": torch.zeros(4)}, r"bias has shape \(4,\)"),
        ({"x": torch.zeros(2, 0, 3)}, "at least one token"),
    ],
)
def test_errors_name_the_numbers(form, change, message):
    inputs = {n: v.detach() for n, v in make_inputs(2, 5, 3, 4).items()}
    with pytest.raises(ValueError, match=message):
        convolve(form, inputs | change)
    with pytest.raises(ValueError, match="activation='gelu' is unknown"):
        convolve(form, inputs, activation="gelu")
