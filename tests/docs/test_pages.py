"""The generated pages say what the code says."""

from __future__ import annotations

import sys

import pytest

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.keys import NameLookup
from megatron_nemotron3.models import get
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


def test_the_example_on_the_page_of_names_runs() -> None:
    page = (pages.DOCS / "reference" / "checkpoint_names.md").read_text(encoding="utf-8")
    scope: dict[str, object] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], scope)
    match = NameLookup(get("super")).key("decoder.layers.7.self_attention.linear_qkv.weight")
    assert scope["match"] == match
    assert [t.name[6] for t in match.row.hf] == ["q", "k", "v"]
    assert isinstance(scope["mapping"], inventory.TensorMapping)
