"""The certificates beside the recipes belong to their commands, with nothing failed."""

from __future__ import annotations

import json

import pytest

from tests.recipes.cases import CASES, RECIPES, Case
from tests.recipes.certificates import check, place

CERTIFIED = [case for case in CASES if place(case).exists()]
#: Also in the short suite: one of a model without MTP.
ANOTHER = "nano-pretrain"


def test_no_certificate_is_left_over() -> None:
    assert {place(case) for case in CERTIFIED} == set(RECIPES.glob("*/*.certificate.json"))
    assert CERTIFIED


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=() if case.model == "super" or case.name == ANOTHER else pytest.mark.full,
        )
        for case in CERTIFIED
    ],
)
def test_certificate(case: Case) -> None:
    """After a change of a recipe that is meant: make certificates."""
    found = check(case)
    assert found["belongs"], found["differences"]
    assert found["passed"]
    text = place(case).read_text()
    assert text.count("\n") == 1 and text.endswith("\n")
    assert "/tmp" not in text and "host" not in json.loads(text)
