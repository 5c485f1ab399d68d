"""Kernels against their definitions in FP64, on any device.

Tolerance of the scan as in tests/layers/test_ssd.py (m roundings to FP32 of at most sum |terms|), with two
changes. A decay is exp of a sum kept to FP32 precision and cut at LOG_DECAY_FLOOR, so it is off by at most 60
eps. In BF16 at most `roundings` factors of every term are rounded on the way, by eps / 2 each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_nemotron3.layers import grouped, ssd
from megatron_nemotron3.layers.chunked_scan import LOG_DECAY_FLOOR
from tests.layers import test_conv
from tests.layers.test_ssd import DROPPED, magnitudes, make_documents, make_inputs, values_and_gradients
from tests.support.references import grouped_linear_reference

#: b, s, h, p, g, n, borders of documents, initial state and D
SCANS = [
    (1, 1, 1, 1, 1, 1, [], True),
    (1, 40, 2, 3, 1, 4, [], False),
    (2, 37, 4, 8, 2, 20, [(0, 10), (1, 16), (1, 17), (0, 35)], True),
    (2, 32, 3, 17, 1, 16, [(0, 16), (1, 29)], True),
    (1, 19, 2, 4, 2, 5, [(0, t) for t in range(19)], True),
]

#: b, s, channels, taps, columns of a wider tensor before x and behind it, borders of documents
CONVOLUTIONS = [
    (1, 1, 8, 4, 0, 0, []),
    (2, 40, 16, 4, 8, 8, []),
    (2, 37, 24, 3, 8, 5, [(0, 10), (1, 16), (1, 17), (0, 35)]),  # rows at odd distances
    (1, 130, 8, 2, 3, 5, [(0, 64)]),  # an odd start
    (3, 19, 8, 4, 0, 8, [(row, t) for row in range(3) for t in range(19)]),
]


def check_convolution(form, shape, *, dtype, activation="silu", with_bias=True, device="cpu"):
    """A convolution of columns of a wider tensor [s, b, …], as the mixer has them, against its definition."""
    b, s, c, k, before, behind, borders = shape

    def embedded(x, weight, bias, *, seq_idx, activation):
        wide = F.pad(x, (before, behind)).transpose(0, 1).contiguous().to(device)
        weight, bias, seq_idx = (None if t is None else t.to(device) for t in (weight, bias, seq_idx))
        part = wide.transpose(0, 1)[..., before : before + c]
        return form(part, weight, bias, seq_idx=seq_idx, activation=activation).cpu()

    inputs = test_conv.make_inputs(b, s, c, k, dtype=dtype, with_bias=with_bias)
    seq_idx = test_conv.make_documents(b, s, borders) + 5 if borders else None
    test_conv.check_against_reference(inputs, seq_idx, activation, form=embedded)


def check_scan(form, shape, *, dtype, device="cpu", roundings=2, strided=False):
    """A scan against the recurrence in FP64: y, final state, all gradients. `roundings` to BF16 of a term."""
    b, s, h, p, g, n, borders, rest = shape
    inputs = make_inputs(b, s, h, p, g, n, dtype=dtype, with_state=rest)
    if not rest:
        inputs["D"] = None
    seq_idx = make_documents(b, s, borders) if borders else None
    torch.manual_seed(1)
    dy = torch.randn(b, s, h, p, dtype=dtype)
    dstate = torch.randn(b, h, p, n)
    exact = {k: None if v is None else v.detach().double().requires_grad_() for k, v in inputs.items()}
    want = values_and_gradients(ssd.ssd_reference, exact, seq_idx, dy.double(), dstate.double())
    size = magnitudes(inputs, seq_idx, dy, dstate)

    def place(t):
        if t is None:
            return None
        t = t.detach().to(device)
        if strided and t.dim() == 1:
            t = torch.stack([t, t], -1)[:, 0]
        elif strided:  # rows further apart than their length, and transposed
            t = torch.cat([t, t], -1).transpose(0, 1).contiguous().transpose(0, 1)[..., : t.shape[-1]]
        return t.requires_grad_(t.is_floating_point())

    placed = {k: place(v) for k, v in inputs.items()}
    got = values_and_gradients(form, placed, place(seq_idx), place(dy).detach(), place(dstate).detach())
    m = n + h // g * p + 2 * 64 + s - LOG_DECAY_FLOOR[torch.float32]
    narrow = roundings * torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 0.0
    eps = m * torch.finfo(torch.float32).eps + narrow
    for name, value in want.items():
        dtype_wanted = inputs[name].dtype if name in inputs else {"y": dtype, "state": torch.float32}[name]
        assert got[name].dtype == dtype_wanted, name
        limit = torch.finfo(dtype_wanted).eps * value.abs() + eps * size[name] + DROPPED
        excess = ((got[name].cpu().double() - value).abs() - limit).max().item()
        assert excess <= 0, f"{name} is {excess:.2e} over its limit (magnitude {size[name]:.2e})"
        error = (got[name].cpu().double() - value).norm() / value.norm()
        # Errors of many terms average out: closer than the bound by far, unless a term is missing.
        tolerance = roundings * 1e-2 if dtype == torch.bfloat16 else 1e-5
        assert not error > tolerance, f"{name} is off by {error:.1e}"
    return got


def check_grouped(counts, out, width, *, device="cpu", together=False, as_tensor=False):
    """BF16 products against FP64 ones: each result is one sum of BF16 products, rounded to BF16 once."""
    torch.manual_seed(0)
    x = torch.randn(sum(counts), width).bfloat16()
    weights = [torch.randn(out, width).bfloat16() for _ in counts]
    dy = torch.randn(sum(counts), out).bfloat16()

    def run(call, leaves, dy, counts):
        leaves = [t.detach().requires_grad_() for t in leaves]
        if together:
            grouped.one_allocation(leaves[1:])
        y = call(leaves[0], leaves[1:], counts)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    on_device = torch.tensor(counts, device=device) if as_tensor else counts
    got = run(grouped.grouped_linear_cuda, [t.to(device) for t in (x, *weights)], dy.to(device), on_device)
    want = run(grouped_linear_reference, [t.double() for t in (x, *weights)], dy.double(), counts)
    size = run(grouped_linear_reference, [t.double().abs() for t in (x, *weights)], dy.double().abs(), counts)
    terms = max(out, width, *counts)
    for i, (a, b, c) in enumerate(zip(got, want, size, strict=True)):
        assert a.dtype == torch.bfloat16
        limit = torch.finfo(a.dtype).eps * b.abs() + terms * torch.finfo(torch.float32).eps * c
        assert ((a.cpu().double() - b).abs() <= limit).all(), f"result {i}"


def check_experts(counts, width, latent, *, device="cpu", as_tensor=False, recompute=False):
    """Experts in BF16 against FP64. An error of eps in a factor of the sum is at most eps of the sum of the
    terms' magnitudes; FC1's output, the activation, their gradients and the results are rounded: 8 eps."""
    torch.manual_seed(0)
    x, probs = torch.randn(sum(counts), latent).bfloat16(), torch.rand(sum(counts))
    weights = [torch.randn(width, latent).bfloat16() for _ in counts]
    weights += [torch.randn(latent, width).bfloat16() for _ in counts]
    dy = torch.randn(sum(counts), latent).bfloat16()

    def run(call, leaves, dy, given, **options):
        leaves = [t.detach().requires_grad_() for t in leaves]
        fc1, fc2 = leaves[2 : 2 + len(counts)], leaves[2 + len(counts) :]
        y = call(leaves[0], leaves[1], fc1, fc2, given, **options)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    given = torch.tensor(counts, device=device) if as_tensor else counts
    placed = [t.to(device) for t in (x, probs, *weights)]
    got = run(grouped.squared_relu_experts_cuda, placed, dy.to(device), given, recompute=recompute)
    exact = [t.double() for t in (x, probs, *weights)]
    want = run(grouped.squared_relu_experts, exact, dy.double(), counts)
    size = run(grouped.squared_relu_experts, [t.abs() for t in exact], dy.double().abs(), counts)
    for i, (a, b, c) in enumerate(zip(got, want, size, strict=True)):
        assert a.dtype == (torch.float32 if i == 2 else torch.bfloat16)
        assert ((a.cpu().double() - b).abs() <= 8 * torch.finfo(torch.bfloat16).eps * c).all(), f"result {i}"
