"""Tables of the documentation that no other test compares with the code they speak of.

Held elsewhere: launching.md (tests/recipes/test_commands.py), generated pages and tables (test_pages.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_nemotron3.checkpoints.convert.quantized import quantization
from megatron_nemotron3.models import get, series
from megatron_nemotron3.precision.serving import RECIPES
from megatron_nemotron3.train.monitor.alarms import RULES
from tests.parallel.layouts import LAYOUTS
from tests.support.quantized_models import all_scales

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, header: str) -> list[list[str]]:
    """Cells of the table below the line `header`."""
    _, found, rest = (DOCS / page).read_text(encoding="utf-8").partition(header + "\n")
    assert found, f"{page} has no table {header}"
    table = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def test_layouts_of_the_equivalence_page() -> None:
    table = rows("measurements.md", "| layout | world | super | nano | dense |")
    assert [(name, int(world)) for name, world, *_ in table] == [
        (name, layout.sizes.world_size) for name, layout in LAYOUTS.items()
    ]
    for name, _, *cells in table:
        shown = [model for model, cell in zip(("super", "nano", "dense"), cells, strict=True) if cell]
        assert shown == [m for m in ("super", "nano", "dense") if m in LAYOUTS[name].models], name


def test_series_and_warnings_of_the_monitor_page() -> None:
    kinds = {
        found
        for name, *_ in rows("monitor.md", "| series in TensorBoard and wandb | per | definition |")
        for found in re.findall(r"`(\w+)/…`", name)
    }
    assert kinds == {*series.KINDS, series.AGGREGATES}
    named = [row[0].strip("`") for row in rows("monitor.md", "| rule | says something when | from |")]
    assert named == [rule.name for rule in RULES]


@pytest.mark.full
def test_sizes_of_quantized_checkpoints() -> None:
    table = rows("checkpoints.md", "| recipe | NVFP4 | FP8 | size | source |")
    assert sorted(row[0].strip("`") for row in table) == sorted(RECIPES)
    for name, _, _, size, _ in table:
        model, recipe = name.strip("`").split("-")
        config = get(model)
        plan = quantization(config, recipe, all_scales(config, recipe))
        assert size == f"{plan.nbytes / 1e9:.1f} GB", name
