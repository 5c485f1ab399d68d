"""Probabilities against their definitions, draws against their frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3.inference.generate.sampling import Sampler, Sampling, draw, probabilities
from tests.support.engines import repeatable


@repeatable(60)
@given(
    # Steps of 1/64, because FP32 may round closer logits to the same probability.
    st.lists(st.integers(-512, 512).map(lambda n: n / 64), min_size=1, max_size=12, unique=True),
    st.floats(0.1, 5.0),
    st.none() | st.integers(1, 12),
    st.none() | st.floats(0.01, 1.0),
)
def test_probabilities_by_definition(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    found = probabilities(torch.tensor(logits), Sampling(temperature, top_k, top_p)).tolist()
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or len(logits)]
    weight = {i: math.exp((logits[i] - max(logits)) / temperature) for i in order}
    total, kept, reached = sum(weight.values()), [], 0.0
    for i in order:
        if kept and reached >= (top_p or 1.0):
            break
        kept.append(i)
        reached += weight[i] / total
    if top_p is not None and any(
        abs(sum(weight[i] for i in order[:n]) / total - top_p) < 1e-5 for n in range(1, len(order) + 1)
    ):
        return  # rounding decides whether one more stays
    expected = [weight[i] / sum(weight[j] for j in kept) if i in kept else 0.0 for i in range(len(logits))]
    assert found == pytest.approx(expected, abs=1e-5)


def test_greedy_is_the_first_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 4.0, 3.0]])
    assert Sampler(Sampling(), range(2))(logits).tolist() == [1, 0]
    assert Sampler(Sampling(temperature=2.0, top_k=1), range(2))(logits).tolist() == [1, 0]
    assert probabilities(logits, Sampling()).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_draw_is_where_the_running_sum_passes() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    points = torch.tensor([0.0, 0.2499, 0.25, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(p.expand(4, -1), points).tolist() == [1, 1, 3, 3]
    # Weights need not add up to 1, and no rounding leads to a token of probability 0.
    for scale in (1e-30, 0.3, 7.0):
        assert draw((p * scale).expand(4, -1), points).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0: use 1 or more"),
        ({"top_p": 0.0}, "top_p=0.0: use a number above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)
