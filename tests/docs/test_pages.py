"""The generated pages say what the code says."""

from __future__ import annotations

import sys

import pytest

from tests.docs import pages

#: argparse words its help differently from one Python to the next.
HELP = pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="the page is written by Python 3.12")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=HELP if "commands" in page else ()) for page in (*pages.PAGES, *pages.TABLES)],
)
def test_page_is_up_to_date(page: str) -> None:
    """`python -m tests.docs.pages` writes them all."""
    assert (pages.DOCS / page).read_text(encoding="utf-8") == pages.current(page)


def test_every_part_of_the_package_says_what_it_is() -> None:
    for line in pages.rooms().splitlines()[2:]:
        part, summary, allowed = (cell.strip() for cell in line.strip("|").rsplit("|", 2)[-3:])
        assert summary and allowed, part
