"""Every recipe has a certificate of `nemotron3 certify` that belongs to its command, with nothing failed."""

from __future__ import annotations

import json

import pytest

from tests.recipes.cases import CASES, RECIPES, Case
from tests.recipes.certificates import check, place


def test_no_certificate_is_left_over() -> None:
    assert {place(case) for case in CASES} == set(RECIPES.glob("*/*.certificate.json"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_certificate(case: Case) -> None:
    """After a change of a recipe that is meant: make certificates."""
    found = check(case)
    assert found["belongs"], found["differences"]
    assert found["passed"]
    text = place(case).read_text()
    assert "/tmp" not in text and "host" not in json.loads(text)
