"""The choice of one option from each group, against all choices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.post_training.compress import choose as module
from megatron_nemotron3.post_training.compress.choose import Option, choose

NUMBER = st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(0, 3)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[Option]], list[float]]:
    """A few groups of a few options, some of them equal, and up to three limits."""
    number = draw(st.integers(0, 3))
    option = st.builds(Option, NUMBER, st.tuples(*[NUMBER] * number))
    groups = draw(st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=5))
    return groups, draw(st.lists(st.floats(0.1, 12), min_size=number, max_size=number))


def total(options: list[Option]) -> tuple[float, list[float]]:
    return sum(o.loss for o in options), [sum(c) for c in zip(*(o.costs for o in options), strict=True)]


def enumerated(groups: list[list[Option]], limits: list[float], slack: float = 0.0) -> float | None:
    """The least loss of all choices that fit."""
    found = (total(list(options)) for options in itertools.product(*groups))
    fitting = [
        loss
        for loss, costs in found
        if all(c <= limit * (1 + slack) for c, limit in zip(costs, limits, strict=True))
    ]
    return min(fitting, default=None)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_is_the_best_of_all_choices(problem: tuple[list[list[Option]], list[float]]) -> None:
    groups, limits = problem
    found, best = choose(groups, limits), enumerated(groups, limits)
    assert best is None or found is not None
    if found is None:
        return
    loss, costs = total([group[index] for group, index in zip(groups, found, strict=True)])
    assert all(c <= limit * (1 + 1e-8) for c, limit in zip(costs, limits, strict=True))
    # A choice may exceed a limit by rounding.
    loose = enumerated(groups, limits, 2e-9)
    assert loose is not None and loose - 1e-7 <= loss <= (float("inf") if best is None else best) + 1e-7


@pytest.mark.parametrize(("most", "allowed"), [(1, 1.1), (3, 1.05), (30, 1.05), (1000, 1.01)])
def test_a_narrow_beam_is_near_the_best(most: int, allowed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a few partial choices the answer fits, and loses little more."""
    monkeypatch.setattr(module, "MOST", most)
    groups = [
        [Option(k * (0.3 + 0.07 * g) ** 0.7, (8.0 - k * (1 + g % 3), 5.0 - k * (g % 2))) for k in range(5)]
        for g in range(6)
    ]
    limits = [26.0, 27.0]
    found, best = choose(groups, limits), enumerated(groups, limits)
    assert found is not None and best is not None
    loss, costs = total([group[index] for group, index in zip(groups, found, strict=True)])
    assert all(c <= limit * (1 + 1e-8) for c, limit in zip(costs, limits, strict=True))
    assert best - 1e-9 <= loss <= best * allowed
