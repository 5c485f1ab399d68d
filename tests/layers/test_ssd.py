"""The chunked scan against the recurrence: values, gradients, documents, extremes, memory.

Tolerance. The reference runs in FP64 on the same (already rounded) inputs, so the whole difference is the
tested form's rounding. Each result is a sum of products; a sum of m terms computed in any order is off by
at most m * eps * sum |terms|. Here m <= n + (h/g) p + 2 CHUNK + s (dot products in turn), and a decay
exp(a_i - a_j) is off by eps * (|a_i| + |a_j|) relatively. sum |terms| is what the same scan gives for
absolute values of its inputs and of the incoming gradients. Results in a narrower dtype are rounded once
more: eps(dtype) * |value|. In FP32 decays below exp(-60) = 9e-27 are 0, and sums of terms of undecayed size
up to 1e6 lose up to DROPPED = 1e-20 by that.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.layers import chunked_scan, ssd

NAMES = ("x", "dt", "A", "B", "C", "D", "initial_state")
DROPPED = 1e-20
AROUND_CHUNKS = (1, 2, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 300)


def make_inputs(b, s, h, p, g, n, *, dtype=torch.float32, seed=0, with_state=True):
    """Random inputs by name. dt is FP32 or wider, as the mixer gives it."""
    torch.manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    inputs = {
        "x": torch.randn(b, s, h, p, dtype=dtype),
        "dt": F.softplus(torch.randn(b, s, h, dtype=wide) - 2),
        "A": -torch.empty(h, dtype=wide).uniform_(0.1, 16.0),
        "B": torch.randn(b, s, g, n, dtype=dtype),
        "C": torch.randn(b, s, g, n, dtype=dtype),
        "D": torch.randn(h, dtype=wide),
        "initial_state": torch.randn(b, h, p, n, dtype=wide) if with_state else None,
    }
    return {k: None if v is None else v.requires_grad_() for k, v in inputs.items()}


def make_documents(b, s, borders):
    """[b, s] index with a new document at each border (a token position) of each row."""
    starts = torch.zeros(b, s, dtype=torch.int32)
    for row, position in borders:
        starts[row % b, position % s] = 1
    return starts.cumsum(1)


def scan(form, inputs, seq_idx=None, **options):
    i = dict(inputs)
    x, dt, A, B, C = (i.pop(k) for k in NAMES[:5])
    return form(x, dt, A, B, C, seq_idx=seq_idx, **i, **options)


def values_and_gradients(form, inputs, seq_idx, dy, dstate):
    y, state = scan(form, inputs, seq_idx, return_final_state=True)
    leaves = {k: v for k, v in inputs.items() if v is not None}
    loss = (y.to(dy.dtype) * dy).sum() + (state.to(dstate.dtype) * dstate).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"y": y.detach(), "state": state.detach(), **dict(zip(leaves, gradients, strict=True))}


def magnitudes(inputs, seq_idx, dy, dstate):
    """The largest sum |terms| of every result: the reference on absolute values."""
    absolute = {k: v.detach().double().abs().requires_grad_() for k, v in inputs.items() if v is not None}
    absolute["A"] = (-absolute["A"]).detach().requires_grad_()
    # dt enters twice, as a factor of x (+) and in the decay (-): the two parts must not cancel here.
    factor = torch.ones_like(absolute["dt"]).requires_grad_()
    scaled = absolute | {"x": absolute["x"] * factor.unsqueeze(-1)}
    y, state = scan(ssd.ssd_reference, scaled, seq_idx, return_final_state=True)
    loss = (y * dy.double().abs()).sum() + (state * dstate.double().abs()).sum()
    *grads, dfactor = torch.autograd.grad(loss, [*absolute.values(), factor])
    out = {"y": y, "state": state, **dict(zip(absolute, grads, strict=True))}
    as_factor = dfactor / absolute["dt"]
    out["dt"] = as_factor.abs() + (out["dt"] - as_factor).abs()
    return {k: v.abs().max().item() for k, v in out.items()}


def check_against_reference(inputs, seq_idx, seed=1):
    torch.manual_seed(seed)
    x, (g, n) = inputs["x"], inputs["B"].shape[2:]
    b, s, h, p = x.shape
    dy, dstate = torch.randn(b, s, h, p, dtype=x.dtype), torch.randn(b, h, p, n, dtype=inputs["dt"].dtype)
    got = values_and_gradients(ssd.ssd_chunked, inputs, seq_idx, dy, dstate)
    exact = {k: None if v is None else v.detach().double().requires_grad_() for k, v in inputs.items()}
    want = values_and_gradients(ssd.ssd_reference, exact, seq_idx, dy.double(), dstate.double())
    size = magnitudes(inputs, seq_idx, dy, dstate)

    exponent = (exact["dt"] * exact["A"]).abs().clamp_max(-2 * chunked_scan.LOG_DECAY_FLOOR[torch.float32])
    largest = exponent.flatten(1).unfold(1, min(s, chunked_scan.CHUNK) * h, h).sum(-1).max().item() / h
    m = n + h // g * p + 2 * chunked_scan.CHUNK + s + 2 * largest
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    for name, value in want.items():
        assert got[name].dtype == (inputs[name].dtype if name in inputs else got[name].dtype)
        limit = torch.finfo(got[name].dtype).eps * value.abs() + m * eps * size[name] + DROPPED
        excess = ((got[name].double() - value).abs() - limit).max().item()
        assert excess <= 0, f"{name} is {excess:.2e} over its limit (magnitude {size[name]:.2e}, m={m:.0f})"
    assert got["y"].dtype == x.dtype
    assert got["state"].dtype == torch.promote_types(x.dtype, torch.float32)


@settings(max_examples=20)
@given(
    s=st.sampled_from(AROUND_CHUNKS) | st.integers(1, 300),
    b=st.integers(1, 2),
    g=st.integers(1, 2),
    heads_per_group=st.integers(1, 3),
    p=st.integers(1, 4),
    n=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    borders=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from([64, 65, 128]) | st.integers(0, 300)), max_size=12
    ),
    with_state=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_chunked_is_the_recurrence(s, b, g, heads_per_group, p, n, dtype, borders, with_state, seed):
    inputs = make_inputs(b, s, g * heads_per_group, p, g, n, dtype=dtype, seed=seed, with_state=with_state)
    check_against_reference(inputs, make_documents(b, s, borders) if borders else None)


@pytest.mark.parametrize("elements", [1, 2**13, 2**30])
def test_result_does_not_depend_on_the_blocks(monkeypatch, elements):
    """One chunk of one row at a time, some, everything at once; 2 heads * 64 * 64 = 2**13 a chunk."""
    monkeypatch.setitem(chunked_scan.BLOCK_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(chunked_scan, "MIN_CHUNKS", 1)
    inputs = make_inputs(3, 200, 2, 3, 1, 4)
    check_against_reference(inputs, make_documents(3, 200, [(0, 10), (1, 64), (2, 128), (2, 129)]))


def test_recurrence_written_out():
    """`ssd_reference` and `ssd_step` against the formula with explicit indices."""
    b, s, h, p, g, n = 2, 5, 4, 3, 2, 2
    i = {k: v.detach() for k, v in make_inputs(b, s, h, p, g, n, dtype=torch.float64).items()}
    y, state = scan(ssd.ssd_reference, i, return_final_state=True)
    stepped = i["initial_state"]
    for row in range(b):
        for head in range(h):
            hidden = i["initial_state"][row, head]
            for t in range(s):
                dt, x = i["dt"][row, t, head], i["x"][row, t, head]
                B, C = (i[k][row, t, head // (h // g)] for k in "BC")
                hidden = torch.exp(dt * i["A"][head]) * hidden + dt * torch.outer(x, B)
                torch.testing.assert_close(y[row, t, head], hidden @ C + i["D"][head] * x)
            torch.testing.assert_close(state[row, head], hidden)
    for t in range(s):
        token = (i[k][:, t] if k in ("x", "dt", "B", "C") else i[k] for k in NAMES[:6])
        y_t, stepped = ssd.ssd_step(*token, stepped)
        torch.testing.assert_close(y_t, y[:, t])
    torch.testing.assert_close(stepped, state)


@pytest.mark.parametrize("chunked_prefix", [1, 64, 100])
def test_state_carries_over(chunked_prefix):
    """A scan in two parts, or continued by single steps, equals the whole scan."""
    inputs = {k: v.detach() for k, v in make_inputs(2, 130, 4, 3, 2, 5, dtype=torch.float64).items()}
    whole, last = scan(ssd.ssd_chunked, inputs, return_final_state=True)
    in_time = ("x", "dt", "B", "C")
    cut = [{k: v[:, part] if k in in_time else v for k, v in inputs.items()}
           for part in (slice(0, chunked_prefix), slice(chunked_prefix, None))]  # fmt: skip
    first, state = scan(ssd.ssd_chunked, cut[0], return_final_state=True)
    second, end = scan(ssd.ssd_chunked, cut[1] | {"initial_state": state}, return_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)
    for t in range(3):
        token = (cut[1][k][:, t] if k in in_time else inputs[k] for k in NAMES[:6])
        y, state = ssd.ssd_step(*token, state)
        torch.testing.assert_close(y, second[:, t])


@settings(max_examples=10)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 63, 64, 65]) | st.integers(1, 90), min_size=2, max_size=4),
    seed=st.integers(0, 2**20),
)
def test_documents_do_not_leak(lengths, seed):
    """Packed documents equal separate documents, and no gradient crosses a border."""
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    seq_idx = ssd.seq_idx_from_cu_seqlens(cu_seqlens, total)
    inputs = make_inputs(1, total, 4, 3, 2, 5, dtype=torch.float64, seed=seed, with_state=False)
    packed = scan(ssd.ssd_chunked, inputs, seq_idx)
    for lo, hi in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        alone = {k: v if v is None or v.dim() == 1 else v[:, lo:hi] for k, v in inputs.items()}
        torch.testing.assert_close(scan(ssd.ssd_chunked, alone), packed[:, lo:hi])
        of = [inputs[k] for k in ("x", "dt", "B", "C")]
        for gradient in torch.autograd.grad(packed[:, lo:hi].sum(), of, retain_graph=True):
            outside = torch.cat([gradient[:, :lo], gradient[:, hi:]], 1)
            assert torch.count_nonzero(outside) == 0


def test_seq_idx_from_cu_seqlens():
    got = ssd.seq_idx_from_cu_seqlens(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 7)
    assert got.tolist() == [[0, 0, 2, 2, 2, 3, 3]]  # document 1 is empty, 3 is padding
    assert got.dtype == torch.int32


@pytest.mark.parametrize("dt_times_a", [59.0, 61.0, 120.0, 1e4, 1e30])
@pytest.mark.parametrize("every", [1, 7])
def test_decays_that_underflow(dt_times_a, every):
    """One step or all steps forget the whole state: results are finite and equal the recurrence."""
    inputs = make_inputs(1, 150, 2, 3, 1, 4)
    with torch.no_grad():
        inputs["A"].fill_(-dt_times_a)
        inputs["dt"].mul_(1e-3 / dt_times_a)
        inputs["dt"][:, ::every] = 1.0
    check_against_reference(inputs, None)


def test_zero_steps_pass_the_state_on():
    inputs = {k: v.detach() for k, v in make_inputs(1, 80, 2, 3, 1, 4).items()}
    inputs["dt"].zero_()
    _, state = scan(ssd.ssd_chunked, inputs, return_final_state=True)
    torch.testing.assert_close(state, inputs["initial_state"], rtol=0, atol=0)


def test_gradient_of_the_state_alone():
    """y unused: its gradient arrives as None."""
    inputs = make_inputs(1, 100, 2, 3, 1, 4, dtype=torch.float64)
    leaves = [inputs[k] for k in ("x", "dt", "A", "B", "initial_state")]
    got, want = (
        torch.autograd.grad(scan(form, inputs, return_final_state=True)[1].square().sum(), leaves)
        for form in (ssd.ssd_chunked, ssd.ssd_reference)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_keeps_the_scan_in_fp32():
    inputs = make_inputs(1, 100, 2, 3, 1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = scan(ssd.ssd_chunked, inputs)
        gradient = torch.autograd.grad(y.sum(), inputs["x"])[0]
    plain = scan(ssd.ssd_chunked, inputs)
    assert torch.equal(y, plain)
    assert torch.equal(gradient, torch.autograd.grad(plain.sum(), inputs["x"])[0])


def saved_tensors(s):
    """(bytes saved, bytes of inputs, elements of the largest tensor saved) of one scan; n = 128."""
    inputs = make_inputs(1, s, 8, 16, 2, 128, with_state=False)
    saved = {}

    def pack(t):
        saved[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        scan(ssd.ssd_chunked, inputs)
    given = [t for t in inputs.values() if t is not None]
    extra = [t for t in saved.values() if t.data_ptr() not in {i.data_ptr() for i in given}]
    return sum(t.nbytes for t in saved.values()), sum(t.nbytes for t in given), sum(t.numel() for t in extra)


def test_saved_memory(monkeypatch):
    """Inputs and one state per block of MIN_CHUNKS chunks: linear in s, and no [l, l] matrix."""
    monkeypatch.setitem(chunked_scan.BLOCK_ELEMENTS, "cpu", 1)  # the fewest chunks a block may have
    short, _, _ = saved_tensors(1024)
    total, given, extra = saved_tensors(2048)
    assert extra == 2048 // (chunked_scan.MIN_CHUNKS * chunked_scan.CHUNK) * 8 * 16 * 128
    assert extra < 2048 * 8 * chunked_scan.CHUNK  # elements of the [l, l] matrices of all heads
    # A state adds n / (MIN_CHUNKS * CHUNK) = 1/2 of x, and x is less than all inputs.
    assert total <= 1.5 * given
    assert total <= 2 * short


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B": (1, 4, 3, 2), "C": (1, 4, 3, 2)}, "h=4 heads are not divisible by g=3"),
        ({"dt": (1, 4, 3)}, r"dt has shape \(1, 4, 3\).*\(1, 4, 4\)"),
        ({"C": (1, 4, 2, 3)}, r"C has shape \(1, 4, 2, 3\)"),
        ({"initial_state": (1, 4, 2, 2)}, "initial_state has shape"),
        ({"x": (1, 0, 4, 3)}, "at least one token"),
    ],
)
@pytest.mark.parametrize("form", [ssd.ssd_chunked, ssd.ssd_reference])
def test_errors_name_the_numbers(form, change, message):
    inputs = {k: v.detach() for k, v in make_inputs(1, 4, 4, 3, 2, 2).items()}
    with pytest.raises(ValueError, match=message):
        scan(form, inputs | {k: torch.zeros(shape) for k, shape in change.items()})
