"""Faults that were written without knowledge of certify and bisect: what was measured of them."""

from __future__ import annotations

import pytest

from tests.proof.bisect import outside as of_bisect
from tests.proof.certify import outside as of_certify


def test_causes_were_judged() -> None:
    """Each that bisect names; what was measured are faults of the files."""
    for chosen in of_certify.SETS.values():
        assert chosen.measured().keys() == chosen.faults.keys()
    rows = of_bisect.measured()
    assert rows.keys() <= of_bisect.OUTSIDE.keys()
    assert [name for name, row in rows.items() if row["named"] and row["right"] is None] == []


def test_figures_of_the_pages() -> None:
    """Certify finds, and bisect names, as many as docs/certify.md and docs/bisect.md say; none wrongly."""
    assert of_certify.counted() in " ".join(of_certify.PAGE.read_text().split())
    assert of_bisect.counted() in " ".join(of_bisect.PAGE.read_text().split())
    assert all(row["side"] and row["right"] is not False for row in of_bisect.measured().values())


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "name"), [(number, name) for number, one in of_certify.SETS.items() for name in one.faults]
)
def test_certify(number: str, name: str) -> None:
    found, before = of_certify.found(number, name), of_certify.SETS[number].measured()[name]
    assert bool(found["found by"]) == bool(before["found by"]), found


@pytest.mark.full
@pytest.mark.parametrize("name", of_bisect.measured())
def test_bisect(world: None, name: str) -> None:
    row, before = of_bisect.row_of(name, of_bisect.side_of(name)), of_bisect.measured()[name]
    assert bool(row["named"]) == bool(before["named"]) and row["side"], row
