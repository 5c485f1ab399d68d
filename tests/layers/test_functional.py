"""Norms, squared ReLU and experts against their references: values, gradients, memory.

Tolerance. The reference runs in FP64 on the same (already rounded) inputs. Values go through fewer than 12
roundings and a mean over the group (whose relative error is at most group * eps, as its terms are positive):
m = group + 12. Gradients subtract the part along u; both parts are at most
rstd * (|dy w| + |unit| mean |dy w unit|) =: size_u. Weight gradients add r rows, w gradients d columns.
Results in a narrower dtype are rounded once more: eps(dtype) * |value|.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.layers import functional, grouped
from megatron_nemotron3.layers.experts import GroupedExperts, GroupedLinear
from tests.support import references

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
BLOCKS = st.sampled_from([1, 64, 2**18])


def leaf(*shape, dtype):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def run(form, inputs, dy, **options):
    y = form(*inputs, **options)
    return [y, *torch.autograd.grad((y.to(dy.dtype) * dy).sum(), inputs)]


def check(fast, reference, inputs, sizes, terms, **options):
    """`sizes` (FP64, of each result) times `terms` roundings bound the error of y and every gradient."""
    x = inputs[0]
    dy = torch.randn_like(x)
    got = run(fast, inputs, dy, **options)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = run(reference, exact, dy.double(), **options)
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    for i, (a, b, size, m) in enumerate(zip(got, want, sizes(exact, dy.double()), terms, strict=True)):
        assert a.dtype == (x if i == 0 else inputs[i - 1]).dtype
        limit = torch.finfo(a.dtype).eps * b.abs() + m * eps * size
        assert ((a.double() - b).abs() <= limit).all(), f"result {i}"


def norm_sizes(group, eps):
    def sizes(exact, dy):
        x, *gate, weight = (t.detach() for t in exact)
        z = gate[0] if gate else None
        u = x if z is None else x * F.silu(z)
        rstd = torch.rsqrt(u.unflatten(-1, (-1, group)).square().mean(-1, keepdim=True) + eps)
        unit = (u.unflatten(-1, (-1, group)) * rstd).abs()
        dunit = (dy * weight).abs().unflatten(-1, (-1, group))
        size_u = (rstd * (dunit + unit * (dunit * unit).mean(-1, keepdim=True))).flatten(-2)
        dweight = (dy.abs() * unit.flatten(-2)).flatten(0, -2).sum(0)
        y = unit.flatten(-2) * weight.abs()
        if z is None:
            return [y, size_u, dweight]
        return [y, size_u * F.silu(z).abs(), size_u * x.abs() * 1.1, dweight]

    return sizes


@settings(max_examples=40)
@given(
    lead=st.sampled_from([(1,), (7,), (3, 5), (2, 1, 4)]),
    d=st.integers(1, 40),
    dtype=DTYPES,
    block=BLOCKS,
    seed=st.integers(0, 2**20),
)
def test_rms_norm(lead, d, dtype, block, seed):
    torch.manual_seed(seed)
    rows = torch.Size(lead).numel()
    inputs = [leaf(*lead, d, dtype=dtype), leaf(d, dtype=dtype)]
    m = [d + 12, 4 * (d + 12), rows + d + 12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "BLOCK_ELEMENTS", block)
        check(functional.rms_norm, references.rms_norm_reference, inputs, norm_sizes(d, 1e-5), m, eps=1e-5)


@settings(max_examples=40)
@given(
    lead=st.sampled_from([(1,), (7,), (3, 5)]),
    groups=st.integers(1, 4),
    group_size=st.integers(1, 12),
    dtype=DTYPES,
    block=BLOCKS,
    seed=st.integers(0, 2**20),
)
def test_gated_group_rms_norm(lead, groups, group_size, dtype, block, seed):
    torch.manual_seed(seed)
    rows, d = torch.Size(lead).numel(), groups * group_size
    inputs = [leaf(*lead, d, dtype=dtype), leaf(*lead, d, dtype=dtype), leaf(d, dtype=torch.float32)]
    if dtype == torch.float64:
        inputs[2] = inputs[2].detach().double().requires_grad_()
    m = group_size + 12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "BLOCK_ELEMENTS", block)
        check(
            functional.gated_group_rms_norm,
            references.gated_group_rms_norm_reference,
            inputs,
            norm_sizes(group_size, 1e-5),
            [m, 4 * m, 4 * m, rows + m],
            group_size=group_size,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_against_torch(dtype):
    """torch's own RMS norm, weights of one: the same value up to its last rounding."""
    torch.manual_seed(0)
    x = torch.randn(20, 64, dtype=dtype)
    torch.testing.assert_close(functional.rms_norm(x, torch.ones(64), 1e-5), F.rms_norm(x, (64,), eps=1e-5))


def test_rms_norm_rounds_once():
    """BF16 in, FP32 weight: product and weight are rounded together, not one after the other."""
    torch.manual_seed(0)
    x, weight = torch.randn(50, 64).bfloat16(), torch.rand(64) + 0.5
    wide = references.rms_norm_reference(x.double(), weight.double())
    assert torch.equal(functional.rms_norm(x, weight), wide.float().bfloat16())


def weighted_sizes(exact, dy):
    x, w = (t.detach() for t in exact)
    positive = F.relu(x)
    y = positive.square() * w.abs().unsqueeze(-1)
    dx = 2 * positive * (w.unsqueeze(-1) * dy).abs()
    return [y, dx, (positive.square() * dy.abs()).sum(-1)]


@settings(max_examples=40)
@given(n=st.integers(0, 30), d=st.integers(1, 20), dtype=DTYPES, block=BLOCKS, seed=st.integers(0, 2**20))
def test_weighted_squared_relu(n, d, dtype, block, seed):
    torch.manual_seed(seed)
    inputs = [leaf(n, d, dtype=dtype), leaf(n, dtype=torch.promote_types(dtype, torch.float32))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "BLOCK_ELEMENTS", block)
        check(
            functional.weighted_squared_relu,
            references.weighted_squared_relu_reference,
            inputs,
            weighted_sizes,
            [4, 4, d + 4],
        )


@pytest.mark.parametrize("strided", ["x", "z", "dy"])
def test_strided_inputs(strided):
    """Transposed [s, b, d] views, as between the scan and the norm."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(3, 5, 8) for name in ("x", "z", "dy")}
    plain = {k: v.clone() for k, v in tensors.items()}
    tensors[strided] = tensors[strided].transpose(0, 1).contiguous().transpose(0, 1)
    results = []
    for t in (tensors, plain):
        x, z = t["x"].requires_grad_(), t["z"].requires_grad_()
        y = functional.gated_group_rms_norm(x, z, torch.ones(8), group_size=4)
        results.append([y, *torch.autograd.grad(y, [x, z], t["dy"])])
    torch.testing.assert_close(results[0], results[1])


def test_saved_memory():
    """BF16 inputs are saved as they are; the norm adds one FP32 value per row and group."""
    x, z, w = (leaf(*s, dtype=torch.bfloat16) for s in [(16, 32), (16, 32), (16,)])
    weight = leaf(32, dtype=torch.bfloat16)
    calls = {
        "rms_norm": (lambda: functional.rms_norm(x, weight), [16]),
        "gated": (lambda: functional.gated_group_rms_norm(x, z, weight, group_size=8), [16 * 4]),
        "weighted": (lambda: functional.weighted_squared_relu(x, w), []),
    }
    for name, (call, expected) in calls.items():
        saved = {}

        def pack(t, saved=saved):
            saved[t.data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call()
        given = {t.data_ptr() for t in (x, z, w, weight)}
        assert [t.numel() for p, t in saved.items() if p not in given] == expected, name


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    block=st.sampled_from([1, 20, 2**17]),
    recompute=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_experts_are_three_steps(counts, sizes, block, recompute, seed):
    """Against separate FC1, activation and FC2 by autograd: values and all gradients, for any block size."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    (width, f, out), t = sizes, sum(counts)
    x, probs = draw(t, width), draw(t)
    fc1, fc2 = [draw(f, width) for _ in counts], [draw(out, f) for _ in counts]
    hidden = references.grouped_linear_reference(x, fc1, counts)
    theirs = references.grouped_linear_reference(
        references.weighted_squared_relu_reference(hidden, probs), fc2, counts
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "BLOCK_ELEMENTS", block)
        ours = grouped.squared_relu_experts(x, probs, fc1, fc2, counts, recompute=recompute)
    torch.testing.assert_close(ours, theirs)
    cotangent, inputs = draw(t, out).detach(), [x, probs, *fc1, *fc2]
    ours_gradients = torch.autograd.grad(ours, inputs, cotangent)
    theirs_gradients = torch.autograd.grad(theirs, inputs, cotangent, materialize_grads=True)
    torch.testing.assert_close(ours_gradients, theirs_gradients)


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_in_bfloat16(recompute):
    """BF16 between the products, FP32 in the activation: as accurate as three separate steps."""
    counts = [30, 0, 50]
    torch.manual_seed(0)
    shapes = [(80, 16), (80,), *[(8, 16)] * 3, *[(16, 8)] * 3]
    leaves, cotangent = [torch.randn(shape) for shape in shapes], torch.randn(80, 16).bfloat16()

    def apart(x, probs, *weights):
        hidden = references.grouped_linear_reference(x, list(weights[:3]), counts)
        activation = references.weighted_squared_relu_reference(hidden, probs)
        return references.grouped_linear_reference(activation, list(weights[3:]), counts)

    def together(x, probs, *weights):
        return grouped.squared_relu_experts(
            x, probs, list(weights[:3]), list(weights[3:]), counts, recompute=recompute
        )

    def run_as(form, dtype):
        # Routing probabilities are FP32 in BF16 training.
        inputs = [t.clone() if i == 1 else t.bfloat16().to(dtype) for i, t in enumerate(leaves)]
        inputs = [t.requires_grad_() for t in inputs]
        y = form(*inputs)
        return [y, *torch.autograd.grad(y, inputs, cotangent.to(y.dtype), materialize_grads=True)]

    exact = run_as(apart, torch.float32)
    for ours, theirs, want in zip(
        run_as(together, torch.bfloat16), run_as(apart, torch.bfloat16), exact, strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert (ours - want).norm() <= 1.2 * (theirs - want).norm() + 1e-6 * want.norm()


class Linears(GroupedLinear):
    """Two matrices without Megatron's groups."""

    def __init__(self, *shape):
        torch.nn.Module.__init__(self)
        self.num_gemms = 2
        for i in range(2):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.randn(shape)))


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_call_their_linears(recompute):
    """Megatron's `--overlap-param-gather` waits for parameters in a forward pre-hook of their module."""
    experts = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(experts)
    experts.linear_fc1, experts.linear_fc2 = Linears(5, 3), Linears(3, 5)
    experts.activation_recompute = recompute
    called = []
    for linear in (experts.linear_fc1, experts.linear_fc2):
        linear.register_forward_pre_hook(lambda module, *_: called.append(module))
    x, probs, counts = torch.randn(7, 3), torch.rand(7), torch.tensor([4, 3])
    y, _ = experts(x, counts, probs)
    assert called == [experts.linear_fc1, experts.linear_fc2]
    hidden, _ = experts.linear_fc1(x, [4, 3])
    activation = references.weighted_squared_relu_reference(hidden, probs)
    torch.testing.assert_close(y, experts.linear_fc2(activation, [4, 3])[0])


def test_errors_name_the_numbers():
    x = torch.zeros(2, 6)
    for form in (functional.gated_group_rms_norm, references.gated_group_rms_norm_reference):
        with pytest.raises(ValueError, match="6 channels are not a multiple of group_size=4"):
            form(x, x, torch.ones(6), group_size=4)
        with pytest.raises(ValueError, match=r"weight has shape \(5,\)"):
            form(x, x, torch.ones(5), group_size=3)
    with pytest.raises(ValueError, match=r"w \(3,\) must be \(2,\)"):
        functional.weighted_squared_relu(x, torch.ones(3))
    with pytest.raises(ValueError, match="1 experts add up to 3, but there are 1 weights and 2 rows"):
        grouped.squared_relu_experts(x, torch.ones(2), [x], [x], [3])


@pytest.mark.parametrize("rows", [1, 3])
def test_joined_gradient(rows: int) -> None:
    """A part written in its place, one in other memory and one that is unused, twice over one graph."""
    x = torch.randn(5, rows, 9, dtype=torch.float64).transpose(0, 1).requires_grad_()
    joined = functional.JoinedGradient(x, [4, 3, 2])
    z, b, unused = joined.split(x)
    y, weight = torch.randn_like(z), torch.rand(4, dtype=torch.float64)
    place = joined.place(0)
    out = functional.gated_group_rms_norm(
        y.transpose(0, 1), z.transpose(0, 1), weight, group_size=2, z_gradient=lambda: place().transpose(0, 1)
    )
    loss = out.square().sum() + b.pow(3).sum() + 0 * unused.detach().sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    expected_z = x.detach()[..., :4].clone().requires_grad_()
    plain = references.gated_group_rms_norm_reference(y, expected_z, weight, group_size=2).square().sum()
    expected = torch.cat(
        [torch.autograd.grad(plain, expected_z)[0], 3 * x[..., 4:7].square(), 0 * x[..., 7:]], -1
    )
    assert first.data_ptr() != second.data_ptr()
    for gradient in (first, second):
        torch.testing.assert_close(gradient, expected)
