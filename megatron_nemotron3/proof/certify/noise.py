"""How far two right FP32 runs may lie apart: measured on the model at hand, not guessed.

A matrix product of inner dimension n, summed in any order, is the exact product of inputs each changed by a
relative sqrt(n) * u or less (u = 2**-24), but for the rarest of cases (Higham and Mary, SIAM J. Sci. Comput.
41, 2019, theorem 2.4: the probabilistic backward error). Two layouts sum in two orders, so they differ by
no more than changing the weights by 2 * sqrt(n) * u does. What a change of u does is measured: the reference
run is repeated with every weight moved to the next float, up or down at random. The largest change of each
tensor, times 2 * sqrt(n), with n the longest sum of the model (tokens of the batch), is its tolerance.

A wrong layout is wrong by far more: a sum over half the ranks is off by half.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.proof.certify.world import Result, initial_weights, train_each

#: Repetitions of the nudged run; a tensor's noise is the largest seen.
NUDGES = 2
UNIT = 2.0**-24


@functools.cache
def weights(case: TrainingCase) -> Tensors:
    """What every layout of a case starts from."""
    return initial_weights(case)


def reference(case: TrainingCase) -> Result:
    """One process. `case` must have the layout of one rank."""
    return _runs(case)[0]


@functools.cache
def _runs(case: TrainingCase) -> list[Result]:
    if case.layout.world_size != 1:
        raise ValueError(f"{case.layout} is not the layout of one process")
    start = weights(case)
    return train_each(case, [start, *(nudged(start, seed) for seed in range(NUDGES))])


def nudged(tensors: Tensors, seed: int) -> Tensors:
    """Every weight at a neighboring float. Expert biases stay: they only choose."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(t: Tensor) -> Tensor:
        up = torch.randint(2, t.shape, generator=generator).bool()
        return torch.nextafter(t, torch.where(up, torch.inf, -torch.inf))

    return {key: t if key.endswith("expert_bias") else nudge(t) for key, t in tensors.items()}


@functools.cache
def tolerances(case: TrainingCase) -> tuple[Tensors, Tensors]:
    """Largest difference allowed in each tensor: of gradients, and of weights after the last step."""
    base, *runs = _runs(case)

    def of(kind: str) -> Tensors:
        moved = [getattr(run, kind) for run in runs]
        return spread(getattr(base, kind), moved, case.sequences * case.seq_length)

    return of("gradients"), of("weights")


def spread(base: Tensors, runs: Sequence[Tensors], terms: int, least: float = 0.0) -> Tensors:
    """Largest difference allowed in each tensor of a run, from those of runs with nudged weights."""
    result: Tensors = {}
    for key, value in base.items():
        moved = torch.stack([(run[key] - value).abs().max() for run in runs]).max()
        # At least one rounding of the largest element, where the nudges happened to cancel.
        floor = UNIT * value.abs().max()
        result[key] = (2 * math.sqrt(terms) * torch.maximum(moved, floor)).clamp(min=least)
    return result
