"""`cpu_mode`: every name it replaces is restored, and importing it changes nothing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state

from megatron_nemotron3 import cpu
from megatron_nemotron3.cpu import megatron, products, torch_names
from megatron_nemotron3.cpu.async_save import forked_results
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.distributed import trained
from tests.support.short_run import mock_argv, short_schedule


def _attributes() -> dict[tuple[int, str], object]:
    table = [*torch_names.table(), *products.table(), *megatron.table(print)]
    return {(id(target), name): getattr(target, name) for target, name, _ in table}


def test_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    before, environment = _attributes(), dict(os.environ)
    assert len(before) > 60
    with cpu.cpu_mode():
        assert torch.cuda.is_available() and str(torch.cuda.current_device()) == "cpu"
    after = _attributes()
    changed = [name for (key, name), value in before.items() if after[key, name] is not value]
    assert changed == []
    assert dict(os.environ) == environment
    with pytest.raises(ZeroDivisionError), cpu.cpu_mode():
        1 / 0  # noqa: B018
    after = _attributes()
    assert all(after[key] is value for key, value in before.items())
    assert not cpu.is_active()


def test_nested_blocks_are_one() -> None:
    with cpu.cpu_mode():
        with cpu.cpu_mode():
            assert cpu.is_active()
        assert cpu.is_active() and torch.zeros(1, device="cuda").device.type == "cpu"
    assert not cpu.is_active()


def test_modules_that_compile_functions_are_imported_inside() -> None:
    """Megatron's `jit_fuser` and `torch.compile`, both with and without options."""
    from megatron.core import jit

    with cpu.cpu_mode():
        torch._dynamo.trace_rules.get_torch_obj_rule_map.cache_clear()  # what compiled before filled it
        for decorator in (torch.compile, torch.compile(dynamic=True), jit.jit_fuser):
            assert decorator(lambda x: x + 1)(torch.zeros(1)) == 1


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Megatron binds torch.compile")
def test_megatron_is_imported_without_the_compiler() -> None:
    """In a fresh process: inductor stays out, torch has its function again, an optimizer can be made."""
    code = """
import sys, torch
from megatron_nemotron3.cpu import cpu_mode, is_active
own = torch.compile
assert not is_active() and not torch.cuda.is_available()  # importing it changes nothing
with cpu_mode():
    import megatron.training.training
    assert torch.compile is not own
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
assert torch.compile is own and "torch._inductor.compile_fx" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_default_device_holds_inside_and_afterwards() -> None:
    """Torch caches the functions it concerns; replacements among them would end it for the whole process."""
    torch.utils._device._device_constructors.cache_clear()
    with cpu.cpu_mode(), torch.device("meta"):
        assert torch.empty(1).is_meta and torch.nn.Linear(1, 1).weight.is_meta
        assert not torch.zeros(1, device=torch.cuda.current_device()).is_meta
    with torch.device("meta"):
        assert torch.empty(1).is_meta and torch.nn.Linear(1, 1).weight.is_meta


def test_names_mean_the_cpu() -> None:
    with cpu.cpu_mode():
        x = torch.ones(2, device="cuda:0")
        assert x.device.type == "cpu"
        assert torch.cuda.current_device() == 0 and torch.cuda.current_device() not in (1, "cuda:0")
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.type("torch.cuda.DoubleTensor").dtype == torch.float64
        assert x.to("cuda").device.type == "cpu" and x.cuda() is x
        saved = pickle.loads(pickle.dumps(torch.cuda.current_device()))  # as in a checkpoint
        assert saved is False and saved == torch.cuda.current_device()
        for here in (torch.cuda.current_device(), torch.device(f"cuda:{torch.cuda.current_device()}")):
            assert torch.zeros(1, device=here).device.type == "cpu"
        assert torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"
        assert isinstance(x, torch.cuda.FloatTensor)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
    assert torch.ones(2).type() == "torch.FloatTensor"


def test_the_accelerator_is_the_same_device() -> None:
    """Every function of `torch.accelerator` answers; those that torch.cuda has are torch.cuda's."""
    given = {"set_device_index": (0,), "set_device_idx": (0,), "set_stream": (None,), "device_index": (0,)}
    own_meaning = {"get_device_capability"}  # torch.cuda's is a pair of numbers
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    with cpu.cpu_mode():
        for module in filter(None, (torch.accelerator, getattr(torch.accelerator, "random", None))):
            for name in set(module.__all__) - {"Graph"}:
                getattr(module, name)(*given.get(name, ()))
        common = set(torch.accelerator.__all__) & set(vars(torch.cuda)) - own_meaning
        differ = [n for n in common if getattr(torch.accelerator, n) is not getattr(torch.cuda, n)]
        assert len(common) >= 5 and differ == []
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device("cuda")
        assert torch.accelerator.current_device_index() == torch.cuda.current_device()
        assert not torch.accelerator.current_stream().is_capturing()
        torch.optim.AdamW([parameter], lr=0.25, weight_decay=0.0).step()
    assert parameter.item() == pytest.approx(0.75)  # the first step of Adam is the learning rate


def test_the_rng_tracker_has_streams_of_its_own() -> None:
    with cpu.cpu_mode():
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker = CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("one", 7)
        plain = torch.rand(3)
        with tracker.fork("one"):
            first = torch.rand(3)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(3), plain), "adding a stream moved the default one"
        with tracker.fork("one"):
            assert not torch.equal(torch.rand(3), first), "a stream must go on, not start again"
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), first)


def uneven_collectives(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """All gathered parts, and this rank's reduced part; ranks 0, 1, 2 have 1, 2 and 0 rows."""
    rank, rows = torch.distributed.get_rank(), [1, 2, 0]
    mine = torch.full((rows[rank], 3), float(rank + 1), dtype=dtype)
    gathered = torch.empty(sum(rows), 3, dtype=dtype)
    torch.distributed.all_gather(list(gathered.split(rows)), mine)
    summed = torch.empty(rows[rank], 3, dtype=dtype)
    torch.distributed.reduce_scatter(summed, list((gathered * (rank + 1)).split(rows)))
    return gathered, summed


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_collectives_of_unequal_parts(dtype: torch.dtype) -> None:
    """Expert TP with EP needs them; gloo itself refuses them."""
    ranks = run_distributed(uneven_collectives, 3, dtype)
    for rank, (gathered, summed) in enumerate(ranks):
        assert gathered[:, 0].tolist() == [1, 2, 2]
        assert summed[:, 0].tolist() == [[6], [12, 12], []][rank]


def groups_of_one_rank() -> None:
    """Runs on two ranks: groups of one rank are shared, others are not."""
    dist = torch.distributed
    # Megatron-FSDP names the arguments; nccl gathers scalars, too.
    whole = torch.zeros(2)
    dist.all_gather_into_tensor(output_tensor=whole, input_tensor=torch.tensor(dist.get_rank() + 1.0))
    assert whole.tolist() == [1, 2]
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    groups = [dist.new_group([r], backend="nccl") for r in (0, 1, 0, 1)]
    assert groups[rank] is groups[rank + 2] and dist.get_world_size(groups[rank]) == 1
    assert dist.get_world_size(groups[other]) == -1 and groups[other] is groups[other + 2]
    both = [dist.new_group([0, 1]) for _ in range(2)]
    assert both[0] is not both[1]
    dist.destroy_process_group(groups[rank])
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total, group=groups[rank])
    assert total == rank + 1
    dist.all_reduce(total, group=both[0])
    assert total == 3
    mine = dist.new_group([rank], use_local_synchronization=True)
    assert mine is not groups[rank]
    # What Megatron's HyperCommGrid calls for the modules of a MIMO model.
    own, listed = dist.new_subgroups_by_enumeration([[1], [0]], backend="nccl")
    assert own is groups[rank] and listed == [groups[1], groups[0]]
    none, (theirs,) = dist.new_subgroups_by_enumeration([[0]])
    assert theirs is groups[0] and none is (theirs if rank == 0 else None)
    pair, (same,) = dist.new_subgroups_by_enumeration([[0, 1]])
    assert pair is same and pair not in both and dist.get_world_size(pair) == 2


def test_groups_of_one_rank_are_one() -> None:
    run_distributed(groups_of_one_rank, 2)


def groups_and_threads() -> tuple[Any, int, int]:
    """A group of one rank, threads before Megatron's groups and with them."""
    before = len(os.listdir("/proc/self/task"))
    group = torch.distributed.new_group([0])
    initialize()
    assert parallel_state.get_tensor_model_parallel_group() is group
    return group, before, len(os.listdir("/proc/self/task"))


def test_a_new_world_has_groups_of_its_own() -> None:
    """Megatron's sixty groups of one rank need the threads of one group only."""
    ((first, before, after),) = run_distributed(groups_and_threads, 1)
    ((second, _, _),) = run_distributed(groups_and_threads, 1)
    assert first is not second
    assert after - before <= 4


def _stepped(build: Any) -> list[torch.Tensor]:
    """Forty parameters of different sizes after three steps, in two groups."""
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n + 1, 3, generator=draw)) for n in range(40)]
    groups = [{"params": parameters[:30], "weight_decay": 0.1}, {"params": parameters[30:]}]
    adam = build(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, capturable=False)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        adam.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_steps_all_parameters_in_one_call(decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import optimizer

    expected = _stepped(torch.optim.AdamW if decoupled else torch.optim.Adam)
    name = "_fused_adamw_" if decoupled else "_fused_adam_"
    fused, calls = getattr(torch, name), []
    monkeypatch.setattr(torch, name, lambda *lists, **given: calls.append(0) or fused(*lists, **given))
    with cpu.cpu_mode():
        assert not optimizer.USING_PYTORCH_OPTIMIZER  # else it would not call this Adam
        build = optimizer.Adam
    found = _stepped(lambda *a, **k: build(*a, adam_w_mode=decoupled, **k))
    assert len(calls) == 3 * 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_scale_are_those_of_megatrons_loops(dtype: torch.dtype) -> None:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, 5, generator=draw).to(dtype) for n in (1, 4, 0, 7)]
    whole = torch.cat([g.flatten() for g in gradients]).float().norm()
    targets = [torch.zeros(g.shape) for g in gradients]
    with cpu.cpu_mode():
        assert clip_grads.l2_norm_impl is not utils.local_multi_tensor_l2_norm
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, None, [gradients], False)
        scaled = [g.clone() for g in gradients]
        for half in (scaled, targets):
            clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, None, [scaled, half], 0.5)
    assert norm.shape == (1,) and norm.dtype == torch.float32
    torch.testing.assert_close(norm[0], whole, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    for gradient, half, quarter in zip(gradients, scaled, targets, strict=True):
        torch.testing.assert_close(half, gradient * 0.5)
        torch.testing.assert_close(quarter, gradient.float() * 0.25)


def _plain_adam(params: Any, adam_w_mode: bool = True, **options: Any) -> torch.optim.Optimizer:
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, **options)


@contextmanager
def with_plain_adam() -> Iterator[None]:
    with mock.patch.object(megatron, "adam", _plain_adam):
        yield


@contextmanager
def without_plain_steps() -> Iterator[None]:
    """torch's Adam in a loop over parameters ends the run."""
    from torch.optim import adam

    with mock.patch.object(adam, "_single_tensor_adam", side_effect=AssertionError("not fused")):
        yield


@pytest.mark.full
def test_a_checkpoint_of_a_plain_adam_goes_on_with_the_fused_one(tmp_path: Path) -> None:
    """The groups come from the checkpoint; losses are those of a run that was never interrupted."""
    config = get("super-tiny").but(pattern="M*", hidden_size=32, mtp_num_layers=0, mtp_pattern=None)
    schedule = short_schedule(4, seq_length=32, global_batch_size=2)

    def losses(inside: Any, *extra: str, **folders: str) -> dict[int, float]:
        curve = trained(mock_argv(config, ParallelLayout(), schedule, extra, **folders), 1, inside=inside)
        return {step: values.loss for step, values in curve.steps.items()}

    place = {"save": str(tmp_path), "load": str(tmp_path)}
    whole = losses(without_plain_steps)
    first = losses(with_plain_adam, "--exit-interval", "2", **place)
    resumed = losses(without_plain_steps, **place)
    assert sorted(first) == [1, 2] and sorted(resumed) == [3, 4]
    # After a start Megatron logs the mean since then.
    mean = {1: whole[1], 2: whole[2], 3: whole[3], 4: (whole[3] + whole[4]) / 2}
    assert first | resumed == pytest.approx(mean, abs=2e-6)


@pytest.mark.full
def test_what_tells_nothing_on_a_cpu_is_not_said(tmp_path: Path) -> None:
    """Neither the imports of a refit nor a first model warn of a missing GPU, TE or apex."""
    program = (
        "import megatron_nemotron3 as n3\n"
        "from megatron_nemotron3.inference.refit import EngineLayout, Refit, Training, make_plan\n"
        "with n3.cpu_mode():\n"
        "    n3.build_model('super-tiny', precision='fp32', backend='torch')\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "arning" not in done.stderr and "CUDA" not in done.stderr, done.stderr


def test_the_queue_of_saves_is_forked_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    modes: list[str] = []

    def context(mode: str) -> SimpleNamespace:
        modes.append(mode)
        return SimpleNamespace(Manager=lambda: SimpleNamespace(Queue=object))

    monkeypatch.setattr(filesystem_async.mp, "get_context", context)
    for inside in (forked_results(), nullcontext()):
        monkeypatch.setattr(filesystem_async, "_results_queue", None)
        with inside:
            filesystem_async.get_write_results_queue()
    assert modes == ["fork", "spawn"]
