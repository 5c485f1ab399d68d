"""The site of docs/ is readable: one name a page, headings in order, and what cannot break fits its column.

That it builds is tests/test_docs.py's. tests/docs/look.py measures the same pages in a browser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import blocks
from tests.docs.cards import title

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

#: Columns of code beside the navigation at 1366 px, with docs/look/site.css.
CODE_COLUMNS = 113
#: Characters of a table's widest words, with three a column for its padding.
TABLE_CHARACTERS = 135
_FENCE = re.compile(r"^(`{3,})[^\n]*\n(.*?)^\1`*$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def prose(page: str) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", (DOCS / page).read_text(encoding="utf-8"))


def tables(page: str) -> Iterator[list[list[str]]]:
    """The cells of every table, row by row, the line below the header left out."""
    for block in re.findall(r"(?:^\|.*\|$\n)+", prose(page), re.M):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]


def widest_word(cell: str, first: bool) -> int:
    """Characters of the longest part of a cell that a browser keeps on one line.

    Code breaks anywhere, but one code alone in a first column does not (docs/look/site.css).
    """
    shown, codes = _LINK.sub(r"\1", cell).replace("**", ""), re.findall("`([^`]+)`", cell)
    words = re.split(r"<br>|[\s-]+", re.sub("`[^`]+`", "", shown))
    return max(map(len, words + codes * (first and len(codes) == 1)))


def navigation(entries: list, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(title, page) of every page in the navigation."""
    for entry in entries:
        for name, below in entry.items():
            if isinstance(below, str):
                found.append((name, below))
            else:
                navigation(below, found)
    return found


def test_navigation_has_every_page_under_its_name() -> None:
    """A page is called the same in the navigation, in links and in its heading, up to a colon."""
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    found = navigation(settings["nav"], [])
    assert sorted(page for _, page in found) == PAGES
    assert [(name, page) for name, page in found if name != title(page) and page != "index.md"] == []


@pytest.mark.parametrize("page", PAGES)
def test_headings_leave_out_no_level(page: str) -> None:
    levels = [len(found) for found in re.findall(r"^(#+) ", prose(page), re.M)]
    assert all(below <= above + 1 for above, below in zip(levels, levels[1:], strict=False)), levels


@pytest.mark.parametrize("page", ["../README.md", "../CONTRIBUTING.md", *PAGES])
def test_links_are_named_by_what_they_lead_to(page: str) -> None:
    """The text of a link to a page is a title or part of a sentence, and neither a file name nor "here"."""
    for text, target in _LINK.findall(prose(page)):
        if re.search(r"\.md(#|$)", target):
            assert ".md" not in text and text.lower() not in ("here", "page", "link"), (text, target)


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_beside_the_navigation(page: str) -> None:
    """What a program prints may be wider: its block scrolls."""
    lines = [line for block in blocks(f"docs/{page}") for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > CODE_COLUMNS] == []


@pytest.mark.parametrize("page", PAGES)
def test_tables_fit_beside_the_navigation(page: str) -> None:
    for table in tables(page):
        widths = [
            max(widest_word(cell, place == 0) for cell in column) + 3
            for place, column in enumerate(zip(*table, strict=True))
        ]
        assert sum(widths) <= TABLE_CHARACTERS, (table[0], widths)


@pytest.mark.parametrize("page", PAGES)
def test_no_asterisk_between_words_is_taken_for_emphasis(page: str) -> None:
    """TP*CP*DP without backslashes or backticks loses its asterisks."""
    text = re.sub("`[^`]*`", "", prose(page))
    assert re.findall(r"\w+\*\w+", text.replace("**", "")) == []
