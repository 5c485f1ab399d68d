"""A layout held against one process."""

from __future__ import annotations

from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.compare import Distance, compared, reference, weights
from megatron_nemotron3.proof.certify.world import Result, train
from tests.parallel.case import Scenario


def check(one: TrainingCase, other: TrainingCase) -> tuple[Distance, Distance]:
    """Run `other` and hold it against `one`, a case of one rank. Returns distances of gradients, weights.

    Raises:
        AssertionError: they differ by more than rounding explains.
    """
    return against(one, reference(one), train(other, weights(one)))


def against(one: TrainingCase, base: Result, found: Result) -> tuple[Distance, Distance]:
    """The comparison itself."""
    distances = {distance.what: distance for distance in compared(one, base, found)}
    if isinstance(one, Scenario) and one.separate:
        del distances["losses of MTP"]  # a mean over micro-batches
    too_far = [_problem(distance) for distance in distances.values() if not distance.share <= 1]
    assert not too_far, "; ".join(too_far)
    return distances["gradients"], distances["weights"]


def _problem(distance: Distance) -> str:
    where = distance.key and f" ({distance.key})"
    return f"{distance.what} differ{where}: by {distance.relative:.2g}, {distance.share:.2g} of the tolerance"
