"""A layout against one process: losses, gradients, weights after the steps, expert biases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_nemotron3.certify.case import Case
from megatron_nemotron3.certify.noise import reference, tolerances, weights
from megatron_nemotron3.certify.tensors import Tensors
from megatron_nemotron3.certify.world import Result, train

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
        """The distance as a sentence."""
        where = self.key and f" ({self.key})"
        return f"{self.what} differ{where}: by {self.relative:.2g}, {self.share:.2g} of the tolerance"


def farthest(what: str, expected: Tensors, found: Tensors, allowed: Tensors) -> Distance:
    """Compare two sets of tensors.

    Raises:
        AssertionError: they do not have the same names.
    """
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    worst = Distance(what, "", 0.0, 0.0)
    for key, value in expected.items():
        difference = float((value - found[key]).abs().max())
        share = difference / max(float(allowed[key]), 1e-300) if difference else 0.0
        if not share <= worst.share:  # larger, or not a number
            worst = Distance(what, key, share, difference / max(float(value.abs().max()), 1e-300))
    return worst


def check(one: Case, other: Case) -> tuple[Distance, Distance]:
    """Run `other` and hold it against `one`, a case of one rank. Returns distances of gradients, weights.

    Raises:
        AssertionError: they differ by more than rounding explains.
    """
    base, start = reference(one), weights(one)
    return against(one, base, train(other, start))


def against(one: Case, base: Result, found: Result) -> tuple[Distance, Distance]:
    """The comparison itself."""
    distances = {distance.what: distance for distance in compared(one, base, found)}
    too_far = [distance.problem for distance in distances.values() if not distance.share <= 1]
    assert not too_far, "; ".join(too_far)
    return distances["gradients"], distances["weights"]


def compared(one: Case, base: Result, found: Result) -> Iterator[Distance]:
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
