"""The table of tensors is complete: nothing twice, nothing missing, seen from each of its projections."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from math import prod

import pytest

from megatron_nemotron3.models import Nemotron3Config, get, names
from megatron_nemotron3.models.tensors import (
    DIALECTS,
    PARAMETER,
    ROWS,
    Row,
    symbol_sizes,
)
from megatron_nemotron3.precision.table import KINDS as LINEAR_KINDS

CONFIGS = [get(name + size) for name in names() for size in ("", "-tiny")]
IDS = [f"{row.part} {row.hf[0].name}" for row in ROWS]


@pytest.mark.parametrize("dialect", [*DIALECTS, "hf"])
def test_a_name_stands_in_one_row_of_its_part(dialect: str) -> None:
    sides = [(r.part, r.hf if dialect == "hf" else r.spelling(dialect).tensors) for r in ROWS]
    found = Counter((part, tensor.name) for part, tensors in sides for tensor in tensors)
    assert set(found.values()) == {1}


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_row_is_consistent(row: Row) -> None:
    assert row.tp in ("replicated", "column", "row", "parts")
    assert (row.tp == "parts") == (len(row.spellings[0].tensors) > 1)
    assert row.needs is None or row.needs in {field.name for field in fields(Nemotron3Config)}
    assert len(row.spelling(PARAMETER).tensors) == 1  # Megatron holds one parameter for each row
    assert len({spelling.dialect for spelling in row.spellings}) == len(row.spellings)
    if row.tp == "row":
        assert len(row.hf[0].shape) == 2
    assert row.trainable or row.linear is None


def test_the_recipe_and_the_table_name_the_same_linears() -> None:
    assert {row.linear for row in ROWS} - {None} == {kind.name for kind in LINEAR_KINDS}
    assert all(kind.rows and kind.modules for kind in LINEAR_KINDS)
    # The rows of a kind stand in one part, whose symbol the kind has.
    assert all(len({row.part for row in kind.rows}) == 1 for kind in LINEAR_KINDS if kind.layer)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_both_sides_of_a_row_hold_the_same_elements(config: Nemotron3Config) -> None:
    sizes = symbol_sizes(config)
    for row in ROWS:
        if row.needs is None or getattr(config, row.needs):
            hf = sum(prod(sizes[s] for s in tensor.shape) for tensor in row.hf)
            for spelling in row.spellings:
                experts = sizes["experts"] if spelling.rule == "stack" else 1
                megatron = sum(prod(sizes[s] for s in tensor.shape) for tensor in spelling.tensors)
                assert megatron == hf * experts, (row.hf, spelling.dialect)
