"""A layout against one process: losses, gradients, weights after the steps, expert biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.parallel.case import Case
from tests.parallel.layouts import CASES, LAYOUTS, PER_TOKEN
from tests.parallel.noise import reference, tolerances, weights
from tests.parallel.tensors import Tensors
from tests.parallel.world import Result, train


@dataclass(frozen=True)
class Distance:
    """The tensor that comes closest to its tolerance."""

    key: str
    #: Largest difference over the tolerance.
    share: float
    #: Largest difference over the largest element.
    relative: float


def cases(model: str, layout: str) -> tuple[Case, Case]:
    """(on one rank, in the layout) of a row of the table."""
    row = LAYOUTS[layout]
    changes: dict[str, Any] = {"mask": row.mask} if row.mask else {}
    case = replace(CASES[model], **changes)
    if row.per_token and not case.config.has_mtp:  # with MTP it is among the flags
        case = replace(case, extra=(*case.extra, PER_TOKEN))
    return case, case.at(row.sizes, *row.extra, without=row.without)


def farthest(expected: Tensors, found: Tensors, allowed: Tensors) -> Distance:
    """Compare two sets of tensors.

    Raises:
        AssertionError: they do not have the same names.
    """
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    worst = Distance("", -1.0, 0.0)
    for key, value in expected.items():
        difference = float((value - found[key]).abs().max())
        share = difference / max(float(allowed[key]), 1e-300) if difference else 0.0
        if share > worst.share:
            worst = Distance(key, share, difference / max(float(value.abs().max()), 1e-300))
    return worst


def check(one: Case, other: Case) -> tuple[Distance, Distance]:
    """Run `other` and hold it against `one`, a case of one rank. Returns distances of gradients, weights.

    Raises:
        AssertionError: they differ by more than rounding explains.
    """
    base, start = reference(one), weights(one)
    found = train(other, start)
    return against(one, base, found)


def against(one: Case, base: Result, found: Result) -> tuple[Distance, Distance]:
    """The comparison itself."""
    gradient_tolerance, weight_tolerance = tolerances(one)
    gradients = farthest(base.gradients, found.gradients, gradient_tolerance)
    assert gradients.share <= 1, f"gradients differ: {gradients}"
    biases = {key for key in base.weights if key.endswith("expert_bias")}
    for key in biases:  # counts of tokens are whole numbers
        assert base.weights[key].equal(found.weights[key]), f"{key} differs"
    after = farthest(base.weights, found.weights, weight_tolerance)
    assert after.share <= 1, f"weights after {one.steps} steps differ: {after}"
    for a, b in zip(base.losses + base.norms, found.losses + found.norms, strict=True):
        assert abs(a - b) <= 1e-5 * abs(a), f"losses and gradient norms {base} and {found}"
    if not one.separate:  # a mean over micro-batches
        for a, b in zip(sum(base.mtp, []), sum(found.mtp, []), strict=True):
            assert abs(a - b) <= 1e-5 * abs(a), f"losses of MTP {base.mtp} and {found.mtp}"
    return gradients, after
