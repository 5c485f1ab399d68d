"""A run against one process: how far apart they are, and how far two right FP32 runs may lie apart, which is
measured on the model at hand, not guessed.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nemotron3.proof.certify.bench import Finding, PropertyState, failed
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.tensors import Tensors, unmatched
from megatron_nemotron3.proof.certify.world import Result, initial_weights, train_each

#: Repetitions of the nudged run; a tensor's noise is the largest seen.
NUDGES = 2
#: Other tokens that are tried where rounding decides the choice of an expert.
OTHER_TOKENS = 3
UNIT = 2.0**-24
#: Change of a router's gradient: by rounding up to 1e-4, by a token with another expert 1e-2 in the proxy.
_FLIP = 1e-3
#: Runs with weights moved so far that every second one or so shows a token at a tie.
_FAR = 5
#: Share of a tolerance: by rounding up to 2, by another expert a hundred.
_JUMP = 8.0


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


def nudged(tensors: Tensors, seed: int, floats: int = 1) -> Tensors:
    """Every weight at a neighboring float, or so many floats away. Expert biases stay: they only choose."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(t: Tensor) -> Tensor:
        up = torch.randint(2, t.shape, generator=generator).bool()
        return t + floats * (torch.nextafter(t, torch.where(up, torch.inf, -torch.inf)) - t)

    return {key: t if key.endswith("expert_bias") else nudge(t) for key, t in tensors.items()}


def moved_far(start: Tensors, terms: int) -> list[Tensors]:
    """Weights that move a result by a quarter of the bound, as right layouts do at most; several."""
    floats = math.ceil(math.sqrt(terms) / 2)
    return [nudged(start, seed, floats) for seed in range(NUDGES, NUDGES + _FAR)]


def flipped(expected: Tensors, found: Tensors) -> bool:
    """Whether two runs with nearly the same weights have sent a token to different experts.

    Then the gradient of a router differs by the share of a token, otherwise by rounding.
    """
    routers = [key for key in expected if key.endswith("router.weight")]
    return any((expected[k] - found[k]).abs().max() > _FLIP * expected[k].abs().max() for k in routers)


def depends_on_rounding(case: TrainingCase) -> bool:
    """Whether rounding decides what one process computes: a token has two experts that are nearly equal.

    Then a comparison with a layout proves nothing on these tokens. It is seen in runs of the one process with
    weights that moved by a float, and by as many as two layouts may differ by.
    """
    base, *runs = _runs(case)
    far = train_each(case, moved_far(weights(case), case.sequences * case.seq_length))
    if any(flipped(base.gradients, run.gradients) for run in (*runs, *far)):
        return True
    return any(distance.share > _JUMP for run in far for distance in compared(case, base, run))


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


#: Largest relative difference of a loss or of the gradients' norm.
_LOSS = 1e-5


@dataclass(frozen=True)
class Distance:
    """How far a property of two runs is apart, where it is farthest for its tolerance."""

    #: "losses", "gradient norms", "losses of MTP", "gradients", "expert biases" or "weights".
    what: str
    #: The tensor; "" for a number of the whole model.
    key: str
    #: Largest difference over the tolerance: above 1 the runs differ by more than rounding explains.
    share: float
    #: Largest difference over the largest element.
    relative: float


def verdict(distance: Distance, where: str, detail: str = "") -> Finding:
    """Return the finding of a distance: it passes up to its tolerance."""
    state = PropertyState.PASS if distance.share <= 1 else PropertyState.FAIL
    return Finding(distance.what, state, where, distance.share, 1.0, distance.key or detail)


def farthest(what: str, expected: Tensors, found: Tensors, allowed: Tensors) -> Distance:
    """Compare two sets of tensors. One that only one of them has is infinitely far."""
    for key in sorted(expected.keys() ^ found.keys()):
        return Distance(what, key, float("inf"), float("inf"))
    worst = Distance(what, "", 0.0, 0.0)
    for key, (difference, share) in shares(expected, found, allowed).items():
        if not share <= worst.share:  # larger, or not a number
            largest = max(float(expected[key].abs().max()), 1e-300)
            worst = Distance(what, key, share, difference / largest)
    return worst


def shares(expected: Tensors, found: Tensors, allowed: Tensors) -> dict[str, tuple[float, float]]:
    """Return the largest difference of each tensor that two sets have, and its share of what is allowed."""
    result = {}
    for key in (key for key in expected if key in found):
        difference = float((expected[key] - found[key]).abs().max())
        share = difference / max(float(allowed[key]), 1e-300) if difference else 0.0
        result[key] = (difference, share)
    return result


def compared(one: TrainingCase, base: Result, found: Result) -> Iterator[Distance]:
    """Yield how far each property of a run is from that of one process."""
    gradient_tolerance, weight_tolerance = tolerances(one)
    yield numbers("losses", base.losses, found.losses)
    yield numbers("gradient norms", base.norms, found.norms)
    yield numbers("losses of MTP", sum(base.mtp, []), sum(found.mtp, []))
    yield farthest("gradients", base.gradients, found.gradients, gradient_tolerance)
    biases = {key for key in base.weights if key.endswith("expert_bias")}
    # Counts of tokens are whole numbers: any difference is one too many.
    differing = [key for key in sorted(biases) if not base.weights[key].equal(found.weights[key])]
    yield Distance("expert biases", *((differing[0], float("inf"), 1.0) if differing else ("", 0.0, 0.0)))
    yield farthest("weights", base.weights, found.weights, weight_tolerance)


def numbers(what: str, expected: Sequence[float], found: Iterable[float]) -> Distance:
    """Compare numbers of the whole model."""
    relative = [abs(a - b) / max(abs(a), 1e-300) for a, b in zip(expected, found, strict=True)]
    worst = max(relative, default=0.0, key=lambda r: (r != r, r))
    return Distance(what, "", worst / _LOSS, worst)


def equal(
    what: str, expected: Tensors, found: Tensors, where: str = "", detail: str = "to the bit"
) -> Finding:
    """Return a finding of tensors that must be equal to the bit."""
    if odd := unmatched(expected, found):
        return failed(what, where, odd)
    for key, value in expected.items():
        other = found[key]
        if value.shape != other.shape:
            return failed(what, where, f"{key}: {list(value.shape)} became {list(other.shape)}")
        if not value.equal(other):
            worst = float((value.double() - other.double()).abs().max())
            return Finding(what, PropertyState.FAIL, where, worst, 0.0, key)
    return Finding(what, PropertyState.PASS, where, 0.0, 0.0, detail)
