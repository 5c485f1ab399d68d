"""The grouped products of emulated experts in Triton, without a GPU: interpreted, and compiled for two."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.triton_kernels import kernels, note_runs, repair_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = "precision.triton_grouped"
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ROOT = Path(__file__).parents[2]


def ranges(counts, gap=0):
    """First and last + 1 row of each expert; `gap` rows behind each belong to none."""
    ends, starts = [], []
    for n in counts:
        starts.append(ends[-1] + gap if ends else 0)
        ends.append(starts[-1] + n)
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)


def check_rows(counts, n, k, dtype, device="cpu", transposed=False, scaled=True):
    """Against FP64 sums: one of k products, each result rounded once."""
    from megatron_nemotron3.precision import triton_grouped

    torch.manual_seed(0)
    x, weights = torch.randn(sum(counts), k).bfloat16(), torch.randn(len(counts), n, k).bfloat16()
    scale = torch.rand(sum(counts)) if scaled else None
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    given = weights.to(device, kind)
    given = given.mT.contiguous().mT if transposed else given
    starts, ends = (t.to(device) for t in ranges(counts))
    placed = None if scale is None else scale.to(device)
    y = triton_grouped.rows_product(x.to(device, kind), given, starts, ends, placed, dtype)
    assert y.dtype == dtype
    parts = [a.double() @ w.double().T for a, w in zip(x.split(counts), weights, strict=True)]
    sizes = [a.double().abs() @ w.double().abs().T for a, w in zip(x.split(counts), weights, strict=True)]
    factor = torch.ones(sum(counts), 1) if scale is None else scale.unsqueeze(1)
    compare(y.cpu(), torch.cat(parts) * factor, torch.cat(sizes) * factor, k, dtype)


def check_weights(counts, n, k, dtype, device="cpu", scaled=True, gap=0):
    """As `check_rows`; rows between experts hold values that must not count."""
    from megatron_nemotron3.precision import triton_grouped

    torch.manual_seed(0)
    starts, ends = ranges(counts, gap)
    total = int(ends[-1]) + gap
    dy, x = torch.randn(total, n).bfloat16(), torch.randn(total, k).bfloat16()
    scale = torch.rand(len(counts)) if scaled else None
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    placed = None if scale is None else scale.to(device)
    tensors = (dy.to(device, kind), x.to(device, kind), starts.to(device), ends.to(device))
    dw = triton_grouped.weight_gradients(*tensors, placed, dtype)
    assert dw.dtype == dtype
    pairs = [(dy[a:b].double(), x[a:b].double()) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    factor = torch.ones(len(counts), 1, 1) if scale is None else scale.view(-1, 1, 1)
    wanted = torch.stack([p.T @ q for p, q in pairs]) * factor
    size = torch.stack([p.abs().T @ q.abs() for p, q in pairs]) * factor
    compare(dw.cpu(), wanted, size, max(counts), dtype)


def compare(found, wanted, size, terms, dtype):
    """A sum of FP32 products errs by an eps of their magnitude per term, and one rounding follows."""
    limit = torch.finfo(dtype).eps * wanted.abs() + 2 * (terms + 2) * torch.finfo(torch.float32).eps * size
    assert ((found.double() - wanted).abs() <= limit).all()


@with_triton
@pytest.mark.full
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert "skipped" not in done.stdout, done.stdout[-5000:]


if INTERPRETED:
    from megatron_nemotron3.precision import triton_grouped

    repair_interpreter()
    RUN = note_runs()
    #: Experts without rows first, in between and last; more rows than a tile has.
    COUNTS = [[3, 0, 5, 1], [0, 20, 0, 33, 0], [16], [0, 0]]

    @pytest.fixture(autouse=True)
    def small_tiles(monkeypatch):
        for name in ("ROWS", "COLUMNS", "TERMS"):
            monkeypatch.setattr(triton_grouped, name, 16)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("counts", COUNTS)
    def test_interpreted_rows(counts, dtype):
        check_rows(counts, 24, 40, dtype)
        check_rows(counts, 24, 40, dtype, transposed=True, scaled=False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("counts", COUNTS)
    def test_interpreted_weights(counts, dtype):
        check_weights(counts, 24, 40, dtype, gap=2)
        check_weights(counts, 17, 16, dtype, scaled=False)

    def test_interpreted_kernels_are_all_there_are():
        """The tests before this one have run every kernel."""
        assert kernels()[KERNELS] <= RUN


COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_nemotron3.precision import triton_grouped as host
from tests.support import ptxas

pointers = dict(x="*bf16", w="*bf16", dy="*bf16", y="*bf16", dw="*bf16", scale="*fp32")
pointers |= dict(expert="*i32", first="*i32", starts="*i32", ends="*i32")
tile = dict(ROWS=host.ROWS, COLUMNS=host.COLUMNS, TERMS=host.TERMS)
for kernel in (host._rows_kernel, host._weight_kernel):
    for more in ({}, {"scale": None}, {"w_n": 1}, {"w_k": 1}):
        constants = tile | {k: v for k, v in more.items() if k in kernel.arg_names}
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        # As at launch: memory from torch's allocator, widths divisible by 16.
        aligned = [n for n in names if n not in constants]
        attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        values = {(names.index(n),): v for n, v in constants.items()}
        source = ASTSource(kernel, signature, values, attributes)
        options = {"num_warps": host.WARPS}
        compiled = triton.compile(source, target=GPUTarget("cuda", TARGET, 32), options=options)
        cores = compiled.asm["ptx"].count("wgmma.mma_async" if TARGET == 90 else "tcgen05.mma")
        spilled = ptxas.use(compiled, TARGET).spilled
        print("RESULT", json.dumps([kernel.__name__, compiled.metadata.shared, cores, spilled]))
"""
#: Shared memory of a block in SM 9.0 and 10.0.
SHARED = 227 * 1024


@with_triton
@pytest.mark.full
@pytest.mark.parametrize("target", [90, 100])
def test_kernels_compile(tmp_path, target):
    """They fit in shared memory and registers, and their products use the tensor cores."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = COMPILE.replace("TARGET", str(target))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    print(*rows, sep="\n")
    assert {name for name, *_ in rows} == kernels()[KERNELS]
    for name, shared, cores, spilled in rows:
        assert shared <= SHARED and cores > 0 and spilled == 0, name


def test_every_kernel_is_tried():
    """Kernels are only in modules whose tests compile and interpret all that they find there."""
    found = kernels()
    assert found.keys() == {KERNELS}
    assert all(found.values())
