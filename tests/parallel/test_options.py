"""Options that save memory or divide the optimizer otherwise: the numbers of a plain run on one rank.

What Megatron refuses on a CPU is tested to be refused still: docs/parity.md lists it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.certify.compare import check
from megatron_nemotron3.certify.ranks import run_distributed
from tests.parallel.layouts import CASES
from tests.properties.entries import case
from tests.properties.measure import attempts, nothing
from tests.properties.step import Refusal

_L = ParallelLayout
_FULL = ("--recompute-granularity", "full", "--recompute-method")
_SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
_INSTANCES = ("--num-distributed-optimizer-instances", "2")


@dataclass(frozen=True)
class Option:
    """Megatron's words in a layout, for a model of `CASES`."""

    model: str
    layout: ParallelLayout
    words: tuple[str, ...]
    quick: bool = False


OPTIONS: dict[str, Option] = {
    "full, uniform": Option("super", _L(tp=2, pp=2), (*_FULL, "uniform", "--recompute-num-layers", "1")),
    "full, block": Option("super", _L(pp=2, vpp=2), (*_FULL, "block", "--recompute-num-layers", "1")),
    "full, CP": Option("super", _L(cp=2), (*_FULL, "uniform", "--recompute-num-layers", "1")),
    "core_attn": Option("super", _L(cp=2), (*_SELECTIVE, "core_attn")),
    "mlp": Option("dense", _L(tp=2), (*_SELECTIVE, "mlp")),
    "moe": Option("nano", _L(dp=2, ep=2), (*_SELECTIVE, "moe")),
    "shared_experts": Option("super", _L(tp=2, ep=2), (*_SELECTIVE, "shared_experts")),
    # The dispatcher's exchanges are repeated on every rank, in the order of the others.
    "all modules": Option("super", _L(tp=2, ep=2), (*_SELECTIVE, "core_attn", "moe"), quick=True),
    "all modules, PP": Option(
        "super", _L(tp=2, pp=2, ep=2), (*_SELECTIVE, "core_attn", "moe", "shared_experts")
    ),
    "optimizer instances": Option("super", _L(dp=4), _INSTANCES),
    "optimizer instances, EP": Option("super", _L(dp=4, ep=2), _INSTANCES, quick=True),
    "optimizer instances, overlap": Option(
        "nano", _L(dp=4, ep=2), (*_INSTANCES, "--overlap-grad-reduce", "--overlap-param-gather")
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if option.quick else pytest.mark.full, id=n) for n, option in OPTIONS.items()],
)
def test_option_equals_the_plain_run(name: str) -> None:
    """Losses, gradients, weights after three steps, expert biases."""
    option = OPTIONS[name]
    one = CASES[option.model]
    check(one, one.at(option.layout, *option.words))


@contextlib.contextmanager
def several_connections() -> Iterator[None]:
    """What FSDP asks for before anything else."""
    with mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}):
        yield


def test_what_megatron_refuses_on_a_cpu() -> None:
    """docs/parity.md has the reasons; moment types and `layernorm` are in tests/properties."""
    offloaded = ("--use-precision-aware-optimizer", "--optimizer-cpu-offload")
    runs = {
        "can't optimize a non-leaf Tensor": case(None, *offloaded, "--optimizer-offload-fraction", "1.0"),
        "only supported with transformer_engine implementation": case(
            None, "--fine-grained-activation-offloading", "--offload-modules", "moe_act"
        ),
        "must be int, not CurrentDevice": case(None, "--use-torch-fsdp2", distributed_optimizer=False),
    }
    pretend = [nothing, nothing, several_connections]
    found = run_distributed(attempts, 1, list(runs.values()), pretend)[0]
    for message, result in zip(runs, found, strict=True):
        assert isinstance(result, Refusal) and message in result.message, result


def test_fsdp_is_for_cuda_devices_only() -> None:
    """Both kinds name the device of their meshes themselves."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel as torch_fsdp
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    assert 'DeviceMesh.from_group(self.process_group, "cuda")' in inspect.getsource(torch_fsdp)
    source = inspect.getsource(mcore_fsdp_adapter)
    assert source.count("DeviceMesh.from_group(") == source.count('device_type="cuda"') > 0
