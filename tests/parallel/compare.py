"""A layout held against one process."""

from __future__ import annotations

from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.compare import Distance, compared, reference, weights
from megatron_nemotron3.proof.certify.world import Result, train


def check(one: TrainingCase, other: TrainingCase) -> tuple[Distance, Distance]:
    """Run `other` and hold it against `one`, a case of one rank. Returns distances of gradients, weights.

    Raises:
        AssertionError: they differ by more than rounding explains.
    """
    return against(one, reference(one), train(other, weights(one)))


def against(one: TrainingCase, base: Result, found: Result) -> tuple[Distance, Distance]:
    """The comparison itself."""
    distances = {distance.what: distance for distance in compared(one, base, found)}
    too_far = [distance.problem for distance in distances.values() if not distance.share <= 1]
    assert not too_far, "; ".join(too_far)
    return distances["gradients"], distances["weights"]
