"""Every layout computes what one process computes: losses, gradients, three steps, expert biases."""

from __future__ import annotations

import pytest

from tests.parallel.compare import check
from tests.parallel.layouts import LAYOUTS, cases

ROWS = [
    pytest.param(model, name, marks=() if model in row.quick else pytest.mark.full, id=f"{model}-{name}")
    for name, row in LAYOUTS.items()
    for model in row.models
]


@pytest.mark.parametrize(("model", "layout"), ROWS)
def test_layout_equals_one_process(model: str, layout: str) -> None:
    check(*cases(model, layout))
