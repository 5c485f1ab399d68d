"""A layout against one process: losses, gradients, weights after the steps, expert biases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.finding import Finding, PropertyState
from megatron_nemotron3.proof.certify.noise import tolerances
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.proof.certify.world import Result

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

    @property
    def problem(self) -> str:
        where = self.key and f" ({self.key})"
        return f"{self.what} differ{where}: by {self.relative:.2g}, {self.share:.2g} of the tolerance"


def verdict(distance: Distance, where: str, detail: str = "") -> Finding:
    """Return the finding of a distance: it passes up to its tolerance."""
    state = PropertyState.PASS if distance.share <= 1 else PropertyState.FAIL
    return Finding(distance.what, state, where, distance.share, 1.0, distance.key or detail)


def farthest(what: str, expected: Tensors, found: Tensors, allowed: Tensors) -> Distance:
    """Compare two sets of tensors. One that only one of them has is infinitely far."""
    for key in sorted(expected.keys() ^ found.keys()):
        return Distance(what, key, float("inf"), float("inf"))
    worst = Distance(what, "", 0.0, 0.0)
    for key, value in expected.items():
        difference = float((value - found[key]).abs().max())
        share = difference / max(float(allowed[key]), 1e-300) if difference else 0.0
        if not share <= worst.share:  # larger, or not a number
            worst = Distance(what, key, share, difference / max(float(value.abs().max()), 1e-300))
    return worst


def compared(one: TrainingCase, base: Result, found: Result) -> Iterator[Distance]:
    """Yield how far each property of a run is from that of one process."""
    gradient_tolerance, weight_tolerance = tolerances(one)
    yield numbers("losses", base.losses, found.losses)
    yield numbers("gradient norms", base.norms, found.norms)
    if not one.separate:  # a mean over micro-batches
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
