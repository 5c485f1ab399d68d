"""The Triton kernels of fake quantization, without a GPU; tests/gpu runs the same checks on one.

In Triton's interpreter, in a process of its own, and compiled for GPUs
that are not there. The torch path is the specification. Equal means bit for bit, NaN where NaN is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.gpu_world import host_waits
from megatron_nemotron3.precision import quantizer
from megatron_nemotron3.precision.quantizer import fake_quantize, units
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.settings import gpu_kernels
from tests.support.packed_operand import PUBLISHED
from tests.support.triton_kernels import kernels, note_runs, repair_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

KERNELS = "precision.triton_quantize_kernels"
TYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = {
    "row": Spec(),
    "column": Spec(axis=-2),
    "tile": Spec(tile=True),
    "tile_column": Spec(tile=True, axis=-2),
    "rotated": Spec(axis=-2, hadamard=True),
    "rotated_row": Spec(hadamard=True),
    "stochastic": Spec(stochastic=True),
    "stochastic_column": Spec(axis=-2, stochastic=True),
    "wgrad_dy": PUBLISHED.wgrad[0],
    "mxfp8": Spec("mxfp8"),
    "mxfp8_column": Spec("mxfp8", axis=-2),
}
EVERY_SPEC = pytest.mark.parametrize("name", SPECS)
DIFFERENT = ("row", "tile_column", "wgrad_dy", "mxfp8")


@contextmanager
def path(kernels: object | None) -> Iterator[None]:
    """The quantizer runs these kernels, None: torch. Tensors without elements go to torch, as ever."""
    with mock.patch.object(quantizer, "_triton_module", lambda x: kernels if x.numel() else None):
        yield


def random_bits(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """What torch's stochastic rounding draws for x in one piece; odd, int16, of its shape."""
    drawn = torch.empty(x.numel() // 4, dtype=torch.int64, device=x.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.bitwise_or_(0x0001_0001_0001_0001).view(torch.int16).view(x.shape)


def seeded(device: str, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit, signs of zeros too; any NaN is as good as another."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    a, b = (t.masked_fill(t.isnan(), torch.nan).contiguous() for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integers), b.view(integers))


def check(x: torch.Tensor, how: Spec, *, dtype=None, amax=None, form=fake_quantize, seed: int = 0) -> None:
    """Kernels against torch; stochastic rounding with torch's random numbers."""
    from megatron_nemotron3.precision import triton_quantize

    device = x.device.type
    before, kernels = x.clone(), triton_quantize
    if how.stochastic:
        finish = partial(triton_quantize.finish, bits=random_bits(x, seeded(device, seed)))
        kernels = SimpleNamespace(magnitudes=triton_quantize.magnitudes, finish=finish)
    with path(None):
        wanted = form(x, how, seeded(device, seed), amax, dtype=dtype)
    with path(kernels):
        found = form(x, how, None, amax, dtype=dtype)
    if form is units:
        assert same(found.amax, wanted.amax)
        found, wanted = found.values, wanted.values
    different = (found != wanted) & ~(found.isnan() & wanted.isnan())
    assert same(found, wanted), f"{int(different.sum())} of {x.numel()} differ"
    assert same(x, before)


def values(*shape: int, device: str = "cpu", dtype=torch.float32) -> torch.Tensor:
    """Normal numbers of many sizes, a tenth zero; of 16 x 16 tiles some nearly or wholly underflow."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(-torch.randint(0, 12, shape, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    rows = x.view(-1, shape[-1])
    sizes = torch.tensor([1, 1, 1, 2.0**-12, 2.0**-20, -0.0])
    tiles = sizes[torch.randint(6, (len(rows) // 16 + 1, shape[-1] // 16 + 1), generator=generator)]
    rows *= tiles.repeat_interleave(16, 0).repeat_interleave(16, 1)[: len(rows), : shape[-1]]
    rows[0, 0] = 4
    return x.to(device, dtype)


def check_spec(name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str = "cpu") -> None:
    """The values in the dtype of x; of BF16 in FP32, too, NVFP4 without the scale of the tensor."""
    how = SPECS[name]
    x = values(*shape, device=device, dtype=dtype)
    check(x, how)
    if dtype == torch.bfloat16:
        form = fake_quantize if how.format == "mxfp8" else units
        check(x.mT.contiguous().mT, how, form=form, dtype=torch.float32)
    elif dtype == torch.float32 and how.format == "nvfp4":
        check(x, how, form=units, dtype=torch.bfloat16)


def ties(found: torch.Tensor) -> torch.Tensor:
    """Times its largest magnitude an amax that puts a block's scale between two E4M3 numbers: the last bit of
    each step decides."""
    return 448 / (8.5 + torch.arange(found.numel(), device=found.device) % 7).view_as(found)


#: An amax that is given, and one that is made of the block grid.
AMAX = {
    "given": lambda found: torch.tensor(3.0, device=found.device),
    "tensor": lambda found: found.amax() * 1.5,
    "matrix": lambda found: found.amax((1, 2), keepdim=True),
    "row": lambda found: found.amax(2, keepdim=True),
    "column": lambda found: found.amax((0, 1)),
    "ties": lambda found: found * ties(found),
}


def check_amax(name: str, kind: str, device: str = "cpu") -> None:
    x = values(2, 16, 96, device=device) * torch.tensor([1.0, 40.0], device=device)[:, None, None]
    amax = AMAX[kind]
    check(x, SPECS[name], amax=amax(x) if kind == "given" else amax)


#: Amax 0, infinite, NaN; S at FLT_MAX; scales that underflow; the largest numbers.
CORNERS = {
    "zeros": 0.0,
    "negative zeros": -0.0,
    "smallest": 2.0**-149,
    "subnormal": 1e-40,
    "below S = FLT_MAX": 7.8e-36,
    "above S = FLT_MAX": 8.0e-36,
    "exponent -127": 448 * 2.0**-127,
    "large": 3e38,
    "inf": torch.inf,
    "-inf": -torch.inf,
    "nan": torch.nan,
}


def check_corners(name: str, device: str = "cpu") -> None:
    """One such number among normal ones, or as the largest."""
    for number in CORNERS.values():
        x = values(SPECS[name].block, 32, device=device).clamp_(-1, 1)
        if abs(number) < 1:
            x *= number
        x[5, 7] = number
        check(x, SPECS[name])


def check_every_exponent(name: str, device: str = "cpu") -> None:
    """Random bit patterns: blocks of any size next to each other. MXFP8: every BF16 number."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 64), generator=generator, dtype=torch.int32)
    # Blocks whose elements have one exponent: few of them vanish.
    exponents = torch.randint(0, 255, (2, 2), generator=generator, dtype=torch.int32)
    exponents = exponents.repeat_interleave(32, 0).repeat_interleave(32, 1)
    x = ((bits & -0x7F800001) | exponents << 23).view(torch.float32)
    check(x.to(device), SPECS[name])
    check(x.to(device), SPECS[name], dtype=torch.bfloat16)
    if SPECS[name].format == "mxfp8":
        every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        every = every.view(512, 128)[:: 1 if device != "cpu" else 16]
        check(every.to(device).contiguous(), SPECS[name])


# In the interpreter


@with_triton
def test_kernels_in_the_interpreter():
    files = [__file__, str(Path(__file__).with_name("test_quantizer_draws.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", *files]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert "skipped" not in done.stdout, done.stdout[-5000:]


if INTERPRETED:
    from megatron_nemotron3.precision import triton_quantize

    repair_interpreter()
    RUN = note_runs()
    pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

    @pytest.fixture(autouse=True)
    def small_programs(monkeypatch):
        """Several programs for a small tensor, the last of them not full."""
        monkeypatch.setattr(triton_quantize, "ROWS", dict.fromkeys(triton_quantize.ROWS, 32))
        monkeypatch.setattr(triton_quantize, "COLUMNS", dict.fromkeys(triton_quantize.COLUMNS, 128))

    @pytest.mark.parametrize(
        ("name", "dtype"),
        # Types differ in how a number is read and written, which a few specs show; tests/gpu has them all.
        [(name, dtype) for name in SPECS for dtype in TYPES if dtype == TYPES[1] or name in DIFFERENT],
    )
    def test_interpreted(name, dtype):
        check_spec(name, dtype, (2, SPECS[name].block, 96))

    @pytest.mark.parametrize("name", ["column", "rotated", "mxfp8_column"])
    def test_interpreted_odd_columns(name, monkeypatch):
        monkeypatch.setattr(triton_quantize, "COLUMNS", dict.fromkeys(triton_quantize.COLUMNS, 32))
        check(values(32, 69), SPECS[name])

    @pytest.mark.parametrize("kind", AMAX)
    @pytest.mark.parametrize("name", ["row", "column", "tile"])
    def test_interpreted_amax(name, kind):
        check_amax(name, kind)

    @pytest.mark.parametrize("name", ["row", "rotated", "mxfp8"])
    def test_interpreted_corners(name):
        check_corners(name)

    @pytest.mark.parametrize("name", ["row", "tile", "mxfp8", "mxfp8_column"])
    def test_interpreted_every_exponent(name):
        check_every_exponent(name)

    @pytest.mark.parametrize("name", ["row", "column", "tile", "rotated", "rotated_row", "mxfp8_column"])
    def test_interpreted_writes_stay_inside(name, monkeypatch):
        """Every tensor a kernel gets lies between numbers that it leaves alone."""
        launch = triton_quantize._launch

        def fenced(kernel, programs, *arguments, **meta):
            copies = {}
            for i, t in enumerate(arguments):
                if isinstance(t, torch.Tensor):
                    copies[i] = t.new_full((t.numel() + 512,), 77)
                    copies[i][256:-256] = t.flatten()
            given = [copies[i][256:-256] if i in copies else t for i, t in enumerate(arguments)]
            launch(kernel, programs, *given, **meta)
            for i, big in copies.items():
                assert (big[:256] == 77).all() and (big[-256:] == 77).all(), (kernel, i)
                arguments[i].copy_(big[256:-256].view_as(arguments[i]))

        monkeypatch.setattr(triton_quantize, "_launch", fenced)
        check(values(2, 32, 96), SPECS[name])

    def test_interpreted_launches(monkeypatch):
        """Two kernels an operand (MXFP8: one), and no wait for the device, the draw of the key included."""
        launched = []
        monkeypatch.setattr(triton_quantize, "_launch", lambda kernel, *_, **meta: launched.append(kernel))
        x = values(2, 32, 64, dtype=torch.bfloat16)
        for name, how in SPECS.items():
            launched.clear()
            with path(triton_quantize):
                assert host_waits(lambda how=how: fake_quantize(x, how), "cpu") == 0
            assert len(launched) == (1 if how.format == "mxfp8" else 2), name

    def test_interpreted_kernels_are_all_there_are():
        """The tests before this one have run every kernel."""
        assert kernels()[KERNELS] <= RUN


# Compiled for SM 9.0 and 10.0, without a GPU

COMPILE = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_nemotron3.precision import triton_quantize as host, triton_quantize_kernels as kernels
from tests.support import ptxas

pointers = dict(x="*bf16", out="*bf16", rotated="*bf16", seed="*i64", largest="*fp32", amax="*fp32")
rows, columns = host.ROWS, host.COLUMNS
cases = [(kernels.magnitudes_of_rows, dict(ROWS=rows["magnitudes"]))]
for tile in (1, 16):
    cases.append((kernels.magnitudes_of_columns, dict(COLUMNS=columns["magnitudes"], TILE=tile)))
for one in ("along", "across"):
    cases.append((kernels.rotate, {"COLUMNS": columns["rotate"], one: 1}))
nvfp4 = dict(NVFP4=True, UNITS=True, bits=None)
nearest, other = dict(seed=None), dict(seed=None, largest=None, amax=None, NVFP4=False, UNITS=False, BLOCK=32)
for each in (False, True):
    for draws in (nearest, {}):
        given = nvfp4 | draws | dict(EACH=each)
        cases.append((kernels.finish_rows, given | dict(ROWS=rows["finish"])))
        size = columns["finish" if draws else "stochastic"]
        cases.append((kernels.finish_columns, given | dict(COLUMNS=size, TILE=1)))
given = nvfp4 | nearest | dict(EACH=False, COLUMNS=columns["finish"], TILE=16)
cases.append((kernels.finish_columns, given | dict(UNITS=False)))
cases.append((kernels.finish_rows, nvfp4 | other | dict(EACH=False, ROWS=rows["finish"])))
cases.append((kernels.finish_columns, nvfp4 | other | dict(EACH=False, COLUMNS=columns["finish"], TILE=1)))
for target in TARGETS:
    for kernel, constants in cases:
        constants = dict(BLOCK=16) | constants
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        # As at launch: memory from torch's allocator, widths divisible by 16.
        aligned = [n for n in names if n not in constants and (n in pointers or n in ("columns", "along"))]
        attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        values = {(names.index(n),): v for n, v in constants.items()}
        source = ASTSource(kernel, signature, values, attributes)
        options = {"num_warps": 4, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        ptx = compiled.asm["ptx"]
        wide = re.findall(r"(?:ld|st)\\.global\\.v[24]\\.b32", ptx)
        approximate = re.findall(r"\\.ftz|\\.approx|div\\.full|(?:add|sub|mul|fma|div|rcp)\\.f32", ptx)
        limits = len(re.findall(r"min\\.NaN", ptx))
        found = [kernel.__name__, compiled.metadata.shared, len(wide), limits, approximate]
        found.append(ptxas.use(compiled, target).spilled)
        print("RESULT", json.dumps(found))
"""


@with_triton
@pytest.mark.full
def test_kernels_compile(tmp_path):
    """What the interpreter cannot say: the compiler takes the kernels; it keeps subnormals, divides exactly
    and contracts nothing (every sum and product says `.rn`), limits keep NaN, elements move together, and
    registers suffice."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    code = COMPILE.replace("TARGETS", "(90, 100)")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(rows) == 2 * 16
    assert {name for name, *_ in rows} == kernels()[KERNELS]
    print(*rows, sep="\n")
    for name, shared, wide, limits, approximate, spilled in rows:
        assert spilled == 0, (name, spilled)
        assert shared <= 48 * 1024 and approximate == [], name
        assert wide > 0 and (limits > 0) == name.startswith("finish"), name


# The choice


@with_triton
def test_kernels_run_where_they_are_asked_for(monkeypatch):
    from megatron_nemotron3.precision import triton_quantize

    def on(device: str, count: int) -> SimpleNamespace:
        return SimpleNamespace(is_cuda=device == "cuda", numel=lambda: count)

    with gpu_kernels(False):
        assert quantizer._triton_module(on("cuda", 32)) is None
    with gpu_kernels(True):
        assert quantizer._triton_module(on("cuda", 32)) is triton_quantize
        for device, count in (("cpu", 32), ("cuda", 0), ("cuda", 2**34 + 32)):
            assert quantizer._triton_module(on(device, count)) is None
    # A CPU needs no Triton.
    monkeypatch.setitem(sys.modules, triton_quantize.__name__, None)
    assert fake_quantize(torch.ones(16, 16), Spec()).sum() == 256
