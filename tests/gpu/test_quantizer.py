"""Fake quantization on a real device: the checks of test_quantizer_compiled.py there, and a model's step.

The tests of models also run on the CPU, plain on both sides, where they show that the comparison holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.models import get
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.settings import emulating, parse_emulation
from tests.precision import test_quantizer_compiled as checks
from tests.support.emulation import quant_recipe
from tests.support.gpu_world import host_waits, world
from tests.support.model_mapping import megatron_model, randomize

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
#: Divisible into every format's blocks; the last one of several programs a row and a column.
SHAPES = [(2, 32, 96), (3, 64, 160), (1056, 2688)]


def on_device(function: Any) -> Any:
    for mark in on_gpu:
        function = mark(function)
    return function


@on_device
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", checks.TYPES)
@pytest.mark.parametrize("name", checks.SPECS)
def test_values(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    checks.check_spec(name, dtype, shape, "cuda")


@on_device
@pytest.mark.parametrize("name", ["column", "mxfp8_column", "wgrad_dy"])
def test_odd_columns(name: str) -> None:
    for columns in (4, 37, 1028):
        checks.check(checks.values(64, columns, device="cuda"), checks.SPECS[name])


@on_device
@pytest.mark.parametrize("kind", checks.AMAX)
@pytest.mark.parametrize("name", ["row", "column", "tile"])
def test_amax(name: str, kind: str) -> None:
    checks.check_amax(name, kind, "cuda")


@on_device
@pytest.mark.parametrize("name", checks.SPECS)
def test_corners(name: str) -> None:
    checks.check_corners(name, "cuda")
    checks.check_every_exponent(name, "cuda")


@on_device
def test_the_device_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """So kernels are used where they are asked for; else every other test here would fail, too."""
    assert checks.quantizer._exact_on(torch.device("cuda", torch.cuda.current_device()))
    assert capsys.readouterr().out == ""


@on_device
def test_stochastic_rounding() -> None:
    for compiled in (False, True):
        with checks.path(compiled):
            for name in ("stochastic", "wgrad_dy"):
                checks.check_replay(name, "cuda")
            for axis in (-1, -2):
                checks.check_draws(axis, 2**20, "cuda")


@on_device
def test_a_cuda_graph_draws_anew() -> None:
    """Captured once, replayed twice: other numbers each time, and none of them the host's to know."""
    x = checks.values(64, 256, device="cuda")
    with checks.path(True):
        checks.fake_quantize(x, Spec(stochastic=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = checks.fake_quantize(x, Spec(stochastic=True))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out) and first.isfinite().all()


# A model


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=on_gpu)]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Sums in one order: atomics move a rounding, that an expert's choice, and that a whole gradient."""
    with pytest.MonkeyPatch.context() as patch, world(request.param):
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        before = torch.are_deterministic_algorithms_enabled()
        # mamba-ssm's kernels follow torch's setting.
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield request.param
        torch.use_deterministic_algorithms(before)


def build(device: str, emulation: str) -> Any:
    with emulating(parse_emulation(emulation)):
        model = megatron_model(
            get("super-tiny"),
            use_cpu_initialization=device == "cpu",
            bf16=True,
            params_dtype=torch.bfloat16,
            quant_recipe=quant_recipe(),
            first_last_layers_bf16=True,
            num_layers_at_start_in_bf16=0,
            num_layers_at_end_in_bf16=1,
        )
    randomize(model, 6)
    return model.train()


def step(model: Any, device: str, compiled: bool, seed: int = 3) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one sequence."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    model.zero_grad(set_to_none=True)
    stream = torch.randint(512, (1, 129), generator=torch.Generator().manual_seed(5)).to(device)
    positions = torch.arange(128, device=device).unsqueeze(0)
    with checks.path(compiled and device != "cpu"):
        loss = model(stream[:, :-1], positions, None, labels=stream[:, 1:].contiguous()).mean()
        loss.backward()
    return loss.item(), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """To the bit."""
    assert one.keys() == two.keys() and sum(g.any().item() for g in two.values()) > len(two) / 2
    return all(torch.equal(g, two[n]) for n, g in one.items())


def test_a_step_has_the_values_of_torch(device: str) -> None:
    model = build(device, "nvfp4")
    wanted, found = (step(model, device, compiled) for compiled in (False, True))
    assert found[0] == wanted[0] and equal(found[1], wanted[1])


def test_a_step_replays(device: str) -> None:
    """The same state of the generators, the same draws; another state, others."""
    model = build(device, "nvfp4")
    first, again, other = (step(model, device, True, seed) for seed in (3, 3, 4))
    assert again[0] == first[0] and equal(again[1], first[1])
    assert not equal(other[1], first[1])


def test_kernels_never_wait(device: str) -> None:
    model = build(device, "nvfp4")
    waits = []
    for side in (False, True):
        step(model, device, side)
        waits.append(host_waits(lambda side=side: step(model, device, side), device))
    assert waits[1] <= waits[0]
