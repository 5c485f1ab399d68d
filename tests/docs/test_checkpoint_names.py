"""docs/reference/checkpoint_names.md is up to date, complete, and its example runs."""

from __future__ import annotations

from pathlib import Path

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.keys import NameLookup
from megatron_nemotron3.models import get
from megatron_nemotron3.models.tensors import ROWS
from tests.docs.checkpoint_names import markdown

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "checkpoint_names.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), "run python -m tests.docs.pages"


def test_every_name_of_the_table_is_on_the_page() -> None:
    page = PAGE.read_text()
    for row in ROWS:
        for tensor in (*row.hf, *(t for s in row.spellings for t in s.tensors)):
            assert f"`{tensor.name}` [{', '.join(tensor.shape)}]" in page


def test_the_example_on_the_page_runs() -> None:
    _, _, rest = PAGE.read_text().partition("```python\n")
    scope: dict[str, object] = {}
    exec(rest.partition("```")[0], scope)
    match = NameLookup(get("super")).key("decoder.layers.7.self_attention.linear_qkv.weight")
    assert scope["match"] == match
    assert [t.name[6] for t in match.row.hf] == ["q", "k", "v"]
    assert isinstance(scope["mapping"], inventory.TensorMapping)
