"""Random numbers of a training step: what a resumed run draws, and which ranks draw the same."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training.initialize import _set_random_seed

from megatron_nemotron3.launch import ParallelLayout, manifest
from megatron_nemotron3.layers.draws import seed_all
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.proof.certify import checkpoints
from megatron_nemotron3.train.processes import ENTRY
from tests.support import distributed
from tests.support.short_run import mock_argv, short_schedule
from tests.support.world import OneRank, world_of_one

#: Rows of Mamba's in_proj fill blocks of 16 and 32 numbers on each of two tensor-parallel ranks.
CONFIG = tiny(get("super")).but(pattern="ME*E", vocab_size=255, mamba_num_heads=32, mamba_head_dim=8)
DRAWING = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--moe-input-jitter-eps", "0.01")
LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "dp2": ParallelLayout(dp=2),
    "pp2": ParallelLayout(pp=2),
}
PRECISIONS = {
    "fp32": (),
    "bf16": ("--bf16",),
    "nvfp4": ("--bf16", "--nemotron3-emulate", "nvfp4,every_layer=1"),
    "mxfp8": ("--bf16", "--nemotron3-emulate", "mxfp8,every_layer=1"),
}


def _train(layout: ParallelLayout, steps: int, *words: str, **folders: str) -> None:
    """Train with a checkpoint after each step. The plain optimizer stores its state by parameter."""
    schedule = short_schedule(steps, seq_length=32, save_interval=1)
    argv = [*mock_argv(CONFIG, layout, schedule, **folders), *words]
    argv.remove("--use-distributed-optimizer")
    distributed.run_launcher(["--device", "cpu", str(ENTRY), *argv], layout.world_size, timeout=240)


def _assert_resumed_is_uninterrupted(
    folder: Path, layout: ParallelLayout, words: tuple[str, ...], steps: int, interrupted: int
) -> None:
    whole, resumed = folder / "whole", folder / "resumed"
    _train(layout, steps, *words, save=str(whole))
    name = f"iter_{interrupted:07d}"
    shutil.copytree(whole / name, resumed / name)
    shutil.copy(whole / manifest.NAME, resumed)
    (resumed / "latest_checkpointed_iteration.txt").write_text(str(interrupted))
    _train(layout, steps, *words, save=str(resumed), load=str(resumed))
    for step in range(interrupted + 1, steps + 1):
        one, other = (checkpoints.read(place / f"iter_{step:07d}") for place in (whole, resumed))
        assert one.keys() == other.keys() and any("exp_avg_sq" in key for key in one)
        assert not [key for key, tensor in one.items() if not tensor.equal(other[key])], step


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path: Path) -> None:
    """Each rank rounds gradients of experts of its own, and drops and shakes tokens of its own."""
    words = (*DRAWING, *PRECISIONS["nvfp4"])
    _assert_resumed_is_uninterrupted(tmp_path, LAYOUTS["ep2"], words, steps=2, interrupted=1)


def _drawn() -> dict[str, Any]:
    """A number of each generator of this process."""
    tracker = get_cuda_rng_tracker()
    numbers: dict[str, Any] = {
        "python": random.random(),
        "numpy": np.random.random(),
        "default": torch.rand(()).item(),
    }
    for stream in tracker.get_states():
        with tracker.fork(stream):
            numbers[stream] = torch.rand(()).item()
    return numbers


def _ranks(replicas_differ: bool) -> dict[str, tuple[SimpleNamespace, SimpleNamespace]]:
    """Rank 0 of every group, and the ranks that are 1 in one of them; with options."""
    names = ("tp", "pp", "dp", "ep", "expt_tp", "cp")
    options = SimpleNamespace(seed=1234, data_parallel_random_init=replicas_differ)
    return {
        one: (SimpleNamespace(**{name: OneRank(2, int(name == one)) for name in names}), options)
        for one in ("none", *names)
    }


@pytest.mark.parametrize("replicas_differ", [False, True])
def test_ranks_draw_the_same_where_megatron_seeds_them_alike(replicas_differ: bool) -> None:
    """Or dropout of replicated activations would differ between tensor-parallel ranks, for instance."""
    upstream, ours = {}, {}
    with world_of_one():
        for name, (groups, options) in _ranks(replicas_differ).items():
            _set_random_seed(
                options.seed,
                options.data_parallel_random_init,
                pp_group=groups.pp,
                dp_group=groups.dp,
                tp_group=groups.tp,
                ep_group=groups.ep,
                etp_group=groups.expt_tp,
            )
            upstream[name] = _drawn()
            seed_all(groups, options, (7, 0, 0))
            ours[name] = _drawn()
    for name, drawn in ours.items():  # Megatron adds 100 for a stage and for an expert rank: not compared
        for stream, number in drawn.items():
            alike = upstream[name][stream] == upstream["none"][stream]
            assert (number == ours["none"][stream]) == alike, (name, stream)


def test_what_is_drawn_follows_from_the_moment_alone() -> None:
    """A step, a chunk of the model, a micro-batch; and every generator has numbers of its own."""
    groups, options = _ranks(False)["none"]
    moments = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    with world_of_one():
        seeded = []
        for moment in (*moments, *reversed(moments)):
            seed_all(groups, options, moment)
            seeded.append(_drawn())
            _drawn()
    assert seeded[:4] == seeded[:3:-1]
    numbers = [number for drawn in seeded[:4] for number in drawn.values()]
    assert len(set(numbers)) == len(numbers) == 4 * 6


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_precision(layout: str, precision: str, tmp_path: Path) -> None:
    words = (*DRAWING, *PRECISIONS[precision])
    _assert_resumed_is_uninterrupted(tmp_path, LAYOUTS[layout], words, steps=4, interrupted=2)
