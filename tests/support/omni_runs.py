"""Runs of recipes/omni/pretrain_omni.py in forked ranks: Megatron's loop, without a checkout's examples."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingData, flags, to_argv
from megatron_nemotron3.models.omni import get_omni
from tests.support.short_run import short_schedule


def words(
    extra: tuple[str, ...] = (),
    *,
    steps: int = 4,
    micro_batch_size: int = 1,
    seq_length: int = 64,
    mock: bool = True,
    **layout: int,
) -> tuple[str, ...]:
    """Command line for tiny Nano Omni on mock data; `layout` of the language model."""
    omni = get_omni("nano-omni-tiny")
    assert omni is not None
    launch = Launch.of(
        omni.language,
        ParallelLayout(**layout),
        precision="fp32",
        backend="torch",
        schedule=short_schedule(steps, micro_batch_size=micro_batch_size, seq_length=seq_length),
        data=TrainingData(mock_data=mock),
        extra=(
            *("--omni-encoders", omni.encoders_json(), "--vocab-size", str(omni.language.vocab_size)),
            *("--num-workers", "0", "--rerun-mode", "disabled", "--dist-ckpt-optim-fully-reshardable"),
            *extra,
        ),
    )
    return tuple(to_argv(flags(launch)))


def train(argv: tuple[str, ...]) -> list[tuple[float, float]]:
    """Run one rank; return (sum of losses, tokens) of its microbatches, empty without the last stage."""
    from megatron_nemotron3.train.omni import arguments, entry

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    sys.argv = ["pretrain_omni.py", *argv]
    args = arguments.parse(list(argv))
    parallel_state._set_global_memory_buffer()
    told: list[tuple[float, float]] = []
    with contextlib.suppress(SystemExit):  # of --exit-interval
        entry.train(args, partial(_forward_step, told))
    return told


def _forward_step(told: list[tuple[float, float]], batches: Any, model: Any) -> Any:
    """As the checkout's `mimo_forward_step`."""
    output, mask = model(**next(batches))

    def loss(losses: torch.Tensor) -> Any:
        total, count = (losses.float() * mask).sum(), mask.sum()
        told.append((total.item(), count.item()))
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}

    return output, loss
