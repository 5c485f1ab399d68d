"""Random numbers of training: those of a microbatch follow from its step, not from what was drawn before.

Megatron stores the random state of one rank for each pipeline stage and tensor-parallel rank, and gives it to
all replicas (Megatron-LM #6858). After a resume other experts' ranks, replicas that had other numbers of
tokens, and on a CPU every rank that has a data loader would draw other numbers. So all generators get new
seeds before each forward of a model that trains: dropout, noise of routers and stochastic rounding, in
forward and backward, then need nothing from a checkpoint. Ranks that Megatron seeds alike stay alike.
"""

from __future__ import annotations

import hashlib
import operator
import random
from typing import Any

import numpy as np
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.utils import get_pg_rank

from megatron_nemotron3.common.switches import megatron_options
from megatron_nemotron3.layers.registration import when_taken
from megatron_nemotron3.precision.products import MODEL_PARALLEL_STREAM


def seed_by_step(stack: torch.nn.Module) -> None:
    """Let the model that takes a stack seed all generators by step and microbatch, in Megatron's loop."""
    when_taken(stack, operator.is_, _Seeding.install)


class _Seeding:
    """Forward hook of a model, or of one chunk of it."""

    def __init__(self) -> None:
        self._step = -1
        self._calls = 0

    @classmethod
    def install(cls, model: torch.nn.Module) -> None:
        if isinstance(model, HybridModel):
            model.register_forward_pre_hook(cls()._before, prepend=True)

    def _before(self, model: Any, _inputs: object) -> None:
        options = megatron_options()
        step = getattr(options, "curr_iteration", None)
        # A graph of the whole iteration calls no hooks, and takes no seed while it is captured.
        if step is None or not model.training or model.config.cuda_graph_impl == "full_iteration":
            return
        if step != self._step:
            self._step, self._calls = step, 0
        # Megatron may run a step again, to tell a fault of the machine from one of the training.
        microbatch = self._calls % get_num_microbatches()
        self._calls += 1
        seed_all(model.pg_collection, options, (step, model.vp_stage or 0, microbatch))


def seed_all(groups: Any, options: Any, moment: tuple[int, ...]) -> None:
    """Seed all generators of this rank.

    Args:
        groups: of the model.
        options: Megatron's: the seed, and whether data-parallel ranks have seeds of their own.
        moment: numbers that tell apart when in a run it is.
    """

    def rank(name: str) -> int:
        return get_pg_rank(getattr(groups, name, None))

    replica = rank("dp") if options.data_parallel_random_init else 0
    common = (options.seed, *moment, rank("pp"), replica)
    seed = _digest(common, "default")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tracker = get_cuda_rng_tracker()
    for stream, own in (
        (get_data_parallel_rng_tracker_name(), ()),
        (MODEL_PARALLEL_STREAM, (rank("tp"),)),
        (get_expert_parallel_rng_tracker_name(), (rank("ep"), rank("expt_tp"))),
    ):
        if stream in tracker.get_states():
            with tracker.fork(stream):
                torch.cuda.manual_seed(_digest(common, stream, *own))


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1
