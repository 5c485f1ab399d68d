"""Asynchronous saves on a CPU: what the process beside training writes is what training had."""

from __future__ import annotations

import os
import pickle
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support import checkpoint_runs as runs

ASYNC = ("--async-save", "--use-persistent-ckpt-worker")


def slow_write(rank: int, buckets: Any, results: Any, *, folder: str) -> None:
    """Writes the tensors once training has gone on."""
    while not Path(folder, "trained").exists():
        time.sleep(0.01)
    tensors = [tensor for _, _, (_, items) in buckets for _, tensor in items]
    Path(folder, "written").write_bytes(pickle.dumps([tensor.tolist() for tensor in tensors]))


def save_while_training(folder: str) -> tuple[list[float], list[float]]:
    """(what was written, what training has then) of a tensor that training changes during the save."""
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    weights = torch.arange(4.0)
    buckets = [("file", "key", ([], [("weights", weights)]))]
    request = async_utils.AsyncRequest(
        async_fn=partial(slow_write, folder=folder),
        async_fn_args=(0, buckets, None),
        finalize_fns=[],
        preload_fn=partial(filesystem_async.FileSystemWriterAsync.preload_tensors, buckets, True),
    )
    queue = async_utils.AsyncCallsQueue(persistent=True)
    queue.warmup_persistent_caller(0, mp_mode="forkserver")
    queue.schedule_async_request(request)
    weights.add_(1.0)
    Path(folder, "trained").touch()
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    (written,) = pickle.loads(Path(folder, "written").read_bytes())
    return written, weights.tolist()


@pytest.mark.full
def test_training_goes_on_while_weights_are_written(tmp_path: Path) -> None:
    """Its next step is not in the file, although both processes share the memory of a CPU's tensors."""
    ((written, now),) = run_distributed(save_while_training, 1, str(tmp_path), apart=True)
    assert (written, now) == ([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0])


def tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint that is a tensor."""
    state: dict[str, Any] = {}
    reader = FileSystemReader(folders.checkpoint_path(folder, iteration))
    torch.use_deterministic_algorithms(True)  # NaN in memory that is not written
    try:
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    finally:
        torch.use_deterministic_algorithms(False)
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.nan_to_num() for name, value in found.items()}


@pytest.mark.full
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(dp=2)], ids=str)
def test_checkpoints_equal_those_of_synchronous_saves(layout: ParallelLayout, tmp_path: Path) -> None:
    """Three in sequence, to the bit; and a run resumes from one with the losses of the others."""
    extra = ("--use-distributed-optimizer",) if layout.dp > 1 else ()
    plain, one = tmp_path / "plain", tmp_path / "one"
    curve, _ = runs.train(layout, *extra, save=str(plain))
    same, output = runs.train(layout, *extra, *ASYNC, save=str(one))
    scheduled = re.findall(r"scheduled an async checkpoint save at iteration +(\d+)", output)
    assert scheduled == ["2", "4", "6"] and folders.latest_iteration(one) == 6
    assert [step.loss for step in same.steps.values()] == [step.loss for step in curve.steps.values()]
    for iteration in (2, 4, 6):
        expected, found = tensors(plain, iteration), tensors(one, iteration)
        assert expected.keys() == found.keys() and len(expected) > 20
        for name, tensor in expected.items():
            different = (tensor != found[name]).sum()
            # Between parameters the optimizer's buffers hold memory that nobody wrote.
            assert different <= (1e-3 * tensor.numel() if name.startswith("optimizer.distributed") else 0), (
                name
            )
    other = runs.copy(one, tmp_path / "other", "iter_0000004")
    resumed, _ = runs.train(layout, *extra, *ASYNC, load=str(other), save=str(other))
    assert sorted(resumed.steps) == [5, 6] and folders.latest_iteration(other) == 6
    assert resumed.steps[5].loss == pytest.approx(curve.steps[5].loss, rel=3e-6)
    assert os.listdir(other) and tensors(other, 6).keys() == tensors(one, 6).keys()
