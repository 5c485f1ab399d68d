"""The documentation's table is the rules and their evidence."""

from __future__ import annotations

from pathlib import Path

from tests.properties.page import markdown

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rules.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), "python -m tests.docs.pages"
