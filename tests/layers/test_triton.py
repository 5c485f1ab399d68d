"""The Triton kernels and the choice among scans, without a GPU; tests/gpu runs the same checks on one.

Triton's interpreter runs kernels on CPU tensors if TRITON_INTERPRET=1 is set before Triton is imported. Some
other test may have imported it: this file runs itself in a process of its own, once, where it has the tests
of kernels. Besides, every kernel is compiled for SM 9.0 and 10.0, which needs no GPU.

Tolerance of the scan as in test_ssd.py (m roundings to FP32 of at most sum |terms|), with two changes. A
decay is exp of a sum kept to FP32 precision and cut at LOG_DECAY_FLOOR, so it is off by at most 60 eps. In
BF16 at most two factors of every term are rounded on the way, by eps / 2 each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_nemotron3.layers import functional, grouped, grouped_gpu, ssd
from megatron_nemotron3.layers.chunked_scan import LOG_DECAY_FLOOR
from megatron_nemotron3.layers.grouped import grouped_linear_reference
from tests.layers.test_ssd import (
    DROPPED,
    magnitudes,
    make_documents,
    make_inputs,
    scan,
    values_and_gradients,
)
from tests.support.triton_kernels import kernels, note_runs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

#: Modules whose kernels this file compiles and interprets.
TRIED = ("layers.triton_activation", "layers.triton_scan_kernels")
#: b, s, h, p, g, n, borders of documents, initial state and D
SCANS = [
    (1, 1, 1, 1, 1, 1, [], True),
    (1, 40, 2, 3, 1, 4, [], False),
    (2, 37, 4, 8, 2, 20, [(0, 10), (1, 16), (1, 17), (0, 35)], True),
    (2, 32, 3, 17, 1, 16, [(0, 16), (1, 29)], True),
    (1, 19, 2, 4, 2, 5, [(0, t) for t in range(19)], True),
]


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


def check_activation(form, rows, width, dtype, device="cpu"):
    """relu(x)^2 * w in strided memory: values to the last bit, w gradients to a sum's rounding."""
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * width, dtype=dtype)[:, :width]
    w, dy = torch.rand(2 * rows)[::2], torch.randn(width, rows, dtype=dtype).t()
    results = []
    for call, move in ((form, lambda t: t.to(device)), (functional.weighted_squared_relu, lambda t: t)):
        x_, w_ = move(x).detach().requires_grad_(), move(w).detach().requires_grad_()
        y = call(x_, w_)
        results.append([t.cpu() for t in (y, *torch.autograd.grad(y, (x_, w_), move(dy)))])
    (y, dx, dw), (y_, dx_, dw_) = results
    assert y.dtype == dx.dtype == dtype and dw.dtype == torch.float32
    assert torch.equal(y, y_)
    torch.testing.assert_close(dx, dx_, rtol=torch.finfo(dtype).eps, atol=0)
    size = (x.float().relu().square() * dy.float().abs()).sum(-1)
    assert ((dw - dw_).abs() <= 2 * (width + 4) * torch.finfo(torch.float32).eps * size).all()


def check_grouped(counts, out, width, *, device="cpu", together=False, as_tensor=False):
    """BF16 products against FP64 ones: each result is one sum of BF16 products, rounded to BF16 once."""
    torch.manual_seed(0)
    x = torch.randn(sum(counts), width).bfloat16()
    weights = [torch.randn(out, width).bfloat16() for _ in counts]
    dy = torch.randn(sum(counts), out).bfloat16()

    def run(call, leaves, dy, counts):
        leaves = [t.detach().requires_grad_() for t in leaves]
        if together:
            grouped_gpu.one_allocation(leaves[1:])
        y = call(leaves[0], leaves[1:], counts)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    on_device = torch.tensor(counts, device=device) if as_tensor else counts
    got = run(
        grouped_gpu.grouped_linear_cuda, [t.to(device) for t in (x, *weights)], dy.to(device), on_device
    )
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
    got = run(grouped_gpu.squared_relu_experts_cuda, placed, dy.to(device), given, recompute=recompute)
    exact = [t.double() for t in (x, probs, *weights)]
    want = run(grouped.squared_relu_experts, exact, dy.double(), counts)
    size = run(grouped.squared_relu_experts, [t.abs() for t in exact], dy.double().abs(), counts)
    for i, (a, b, c) in enumerate(zip(got, want, size, strict=True)):
        assert a.dtype == (torch.float32 if i == 2 else torch.bfloat16)
        assert ((a.cpu().double() - b).abs() <= 8 * torch.finfo(torch.bfloat16).eps * c).all(), f"result {i}"


# In the interpreter


def repair_interpreter():
    """Three gaps of the interpreter of Triton 3.6. numpy >= 2.4 refuses its loop bounds (arrays of one
    element as numbers). It multiplies the bit patterns of BF16. It cuts FP32 to BF16; a GPU rounds."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patch_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def round_to_nearest(self, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    interpreter._patch_lang_tensor = patch_index
    builder.create_dot = lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest)
    builder.cast_impl = round_to_nearest


@with_triton
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert "skipped" not in done.stdout, done.stdout[-5000:]


if INTERPRETED:
    from megatron_nemotron3.layers import triton_activation, triton_scan

    repair_interpreter()
    RUN = note_runs()

    @pytest.fixture
    def short_cells(monkeypatch):
        """Cells of 16 tokens, so that short sequences have several and a ragged last one."""
        monkeypatch.setattr(triton_scan, "CHUNK", 16)
        monkeypatch.setattr(triton_scan, "PASS_BLOCK", 64)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", SCANS)
    def test_interpreted_scan(short_cells, shape, dtype):
        check_scan(triton_scan.ssd_triton, shape, dtype=dtype, strided=len(shape[6]) == 2)

    def test_interpreted_scan_with_cells_of_64():
        check_scan(triton_scan.ssd_triton, (1, 70, 2, 4, 1, 4, [(0, 65)], True), dtype=torch.float32)

    def test_interpreted_mixed_dtypes(short_cells):
        """x in BF16, B and C in FP32: every product in FP32."""
        i = {k: v.detach() for k, v in make_inputs(1, 20, 2, 3, 1, 4).items()}
        i["x"] = i["x"].bfloat16()
        want = scan(ssd.ssd_chunked, i, return_final_state=True)
        got = scan(triton_scan.ssd_triton, i, return_final_state=True)
        torch.testing.assert_close(got, want)

    def test_interpreted_gradient_of_one_result(short_cells):
        """Losses of only the final state or only y; and no gradient where none is required."""
        for result in (0, 1):
            gradients = []
            for form in (ssd.ssd_chunked, triton_scan.ssd_triton):
                i = make_inputs(1, 20, 2, 3, 1, 4)
                i["dt"] = i["dt"].detach()
                y = scan(form, i, return_final_state=True)[result]
                leaves = [v for v in i.values() if v.requires_grad]
                gradients.append(torch.autograd.grad(y.square().sum(), leaves, allow_unused=True))
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    def test_interpreted_strong_decay(short_cells):
        """Time steps that empty the state, however long: nothing overflows, and decays between the
        tokens after them keep their precision."""
        i = make_inputs(1, 40, 2, 3, 1, 4)
        with torch.no_grad():
            strong = [*range(2, 12), 17]
            i["dt"][:, strong] = 1e4
            i["dt"][:, 30] = 1e30
            i["x"][:, [*strong, 30]] = 0.0
            i["A"].fill_(-1.0)
        want = scan(ssd.ssd_reference, {k: v.detach().double() for k, v in i.items()})
        y = scan(triton_scan.ssd_triton, i)
        torch.testing.assert_close(y.double(), want, rtol=2e-6, atol=2e-6 * want.abs().max().item())
        finite = torch.autograd.grad(y[:, 18:].sum(), [i["x"], i["dt"], i["B"], i["C"]])
        assert all(t.isfinite().all() for t in finite)

    def test_interpreted_errors():
        i = make_inputs(1, 2, 2, 3, 1, 4, dtype=torch.float64)
        with pytest.raises(ValueError, match="FP64: use ssd_chunked"):
            scan(triton_scan.ssd_triton, i)
        with pytest.raises(ValueError, match="head dimension 129 and state size 4"):
            scan(triton_scan.ssd_triton, make_inputs(1, 2, 1, 129, 1, 4))
        with pytest.raises(ValueError, match="head dimension 64 and state size 257"):
            scan(triton_scan.ssd_triton, make_inputs(1, 2, 1, 64, 1, 257))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("rows, width", [(0, 8), (1, 1), (5, 16), (4, 37)])
    def test_interpreted_activation(monkeypatch, rows, width, dtype):
        monkeypatch.setattr(triton_activation, "BLOCK", 16)
        check_activation(triton_activation.weighted_squared_relu, rows, width, dtype)

    def test_interpreted_activation_shows_nan():
        x = torch.tensor([[1.0, torch.nan, -1.0]])
        y = triton_activation.weighted_squared_relu(x, torch.ones(1))
        assert y.isnan().tolist() == [[False, True, False]]
        with pytest.raises(ValueError, match=r"x \(1, 3\) and w \(2,\)"):
            triton_activation.weighted_squared_relu(x, torch.ones(2))

    def test_interpreted_kernels_are_all_there_are():
        """The tests before this one have run every kernel."""
        assert set().union(*(kernels()[module] for module in TRIED)) <= RUN


# Compiled for SM 9.0 and 10.0, without a GPU

COMPILE = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_nemotron3.layers import triton_activation, triton_scan, triton_scan_kernels as kernels
from tests.support import ptxas

numbers = {"s", "h", "p", "nc", "per_group", "size", "width"}
wide = {"x", "B", "C", "dy", "v", "M", "y", "dx", "dB", "dC"}  # in the model's dtype
products = ("cell_states", "outputs", "head_gradients", "group_gradients")

def scans(head, n, dtype, **bare):
    for name in products:
        kernel = getattr(kernels, name)
        given = dict(n=n, L=triton_scan.CHUNK, P=head, N=n, DOT=dtype) | bare
        stages = 3
        if name == "group_gradients":
            stages = 2 if head * n <= triton_scan.PIPELINED_STATE else 1
        given = {k: v for k, v in given.items() if k in kernel.arg_names}
        yield kernel, given, triton_scan.WARPS[name.replace("cell_", "")], stages

published = list(scans(64, 128, tl.bfloat16))
for reverse in (False, True):
    published.append((kernels.pass_states, dict(BLOCK=triton_scan.PASS_BLOCK, REVERSE=reverse), 4, 3))
for kernel in (triton_activation._forward_kernel, triton_activation._backward_kernel):
    published.append((kernel, dict(BLOCK=triton_activation.BLOCK), 4, 3))
# Without documents and D; sizes of 1, which the compiler takes as constants.
bare = dict(document=None, D=None, s=1, h=1, per_group=1, p=1, x_h=1)
others = [c for c in scans(64, 128, tl.bfloat16, **bare) if c[0] is not kernels.cell_states]
# The largest that the kernels take.
for head, n in ((128, 128), (64, 256)):
    others += scans(head, n, tl.bfloat16)
    others += scans(head, n, tl.float32) if TARGETS[0] == 90 else ()
if TARGETS[0] == 100:
    others += scans(128, triton_scan.MAX_STATE_FP32_SM10, tl.float32)

for target in TARGETS:
    for place, cases in (("published", published), ("other", others)):
        for kernel, constants, warps, stages in cases:
            narrow = constants.get("DOT") is not tl.float32
            def kind(name):
                if name in constants:
                    return "constexpr"
                if name in wide:
                    return "*bf16" if narrow else "*fp32"
                if name == "document":
                    return "*i32"
                return "i32" if name in numbers or "_" in name else "*fp32"
            signature = {name: kind(name) for name in kernel.arg_names}
            values = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
            # As at launch: memory of torch's allocator, strides and widths divisible by 16.
            aligned = [n for n in kernel.arg_names if kind(n)[0] == "*" or n[-2:] in ("_b", "_s", "_h", "_g")]
            attributes = {
                (kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants
            }
            source = ASTSource(kernel, signature, values, attributes)
            options = {"num_warps": warps, "num_stages": stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
            cores = compiled.asm["ptx"].count("wgmma.mma_async" if target == 90 else "tcgen05.mma")
            assert "trap" not in compiled.asm["ptx"], (target, kernel.__name__, constants)
            found = [target, place, kernel.__name__, compiled.metadata.shared, cores if narrow else None]
            print("RESULT", json.dumps([*found, *ptxas.use(compiled, target)]))
"""

#: Shared memory of a block in SM 9.0 and 10.0.
SHARED = 227 * 1024
#: Bytes that a thread stores and loads, known and accepted, at the published sizes.
SPILLED = {(90, "group_gradients"): 112}
PRODUCTS = {"cell_states", "outputs", "head_gradients", "group_gradients"}


@with_triton
@pytest.mark.full
@pytest.mark.parametrize("target", [90, 100])
def test_kernels_compile(tmp_path, target):
    """What the interpreter cannot say: the compiler accepts the kernels, they fit in shared memory, also for
    the largest head and state and in FP32, their products use the tensor cores in BF16, and at the published
    sizes registers suffice."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    code = COMPILE.replace("TARGETS", f"({target},)")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    print(*rows, sep="\n")
    assert len(rows) == 8 + 3 + (4 if target == 90 else 3) * 4
    assert {name for _, _, name, *_ in rows} == set().union(*(kernels()[module] for module in TRIED))
    for _, place, name, shared, cores, _, spilled in rows:
        assert shared <= SHARED, name
        assert cores is None or (cores > 0) == (name in PRODUCTS), name
        assert spilled <= SPILLED.get((target, name), 0) or place == "other", name


def test_every_kernel_is_tried():
    """Kernels are only in modules whose tests compile and interpret all that they find there."""
    found = kernels()
    others = {"precision.triton_quantize_kernels", "precision.triton_grouped"}
    assert found.keys() == others | {*TRIED}
    assert all(found.values()) and sum(map(len, found.values())) >= 12


# The choice
