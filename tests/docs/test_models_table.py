"""The documentation's table is the catalog."""

from __future__ import annotations

from pathlib import Path

from tests.docs.models_table import markdown

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "models.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), "python -m tests.docs.pages"


def test_published_totals_are_on_the_page() -> None:
    for total in (
        "31,577,940,288",
        "123,611,033,088",
        "560,524,603,904",
        "42,683",
        "51,023",
        "78,295,670,272",
    ):
        assert total in markdown()
