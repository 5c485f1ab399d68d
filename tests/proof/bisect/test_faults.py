"""Every seeded fault is found as the table says, and no other side is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_nemotron3.proof.bisect.diagnose import Investigation, cause_table
from tests.proof.bisect import faults
from tests.proof.bisect.fault_list import FAULTS
from tests.proof.bisect.faults import MODES, cell
from tests.proof.bisect.systems import MODEL

#: Of an engine with hidden states.
QUICK = (("conv state off by one", "FP32, hidden states"),)


def _parameters() -> list[Any]:
    rows = faults.measured()
    return [
        pytest.param(name, mode, marks=() if (name, mode) in QUICK else pytest.mark.full)
        for name in FAULTS
        for mode in rows.get(name, {})
    ]


@pytest.mark.parametrize(("name", "mode"), _parameters())
def test_fault_is_found(world: None, name: str, mode: str) -> None:
    row = faults.verdict(name, faults.diagnose(name, mode))
    assert not row["wrong side"]
    assert cell(row) == cell(faults.measured()[name][mode]), row


def test_cause_from_log_probabilities_alone() -> None:
    """With a third of the hypotheses about experts."""
    name = "scaling factor"
    words = "factor", "latent", "shared", "normalisation", "fewer"
    causes = [c for c in cause_table(MODEL) if c.kind == "E" and any(word in c.name for word in words)]
    quick = Investigation(faults.investigation().model, None, causes)
    scored = faults.faulty(name, torch.float32)
    side = quick.side("engine", faults.recording(scored, "hf", torch.float32, False))
    assert side.deviates and side.layer == FAULTS[name].layer
    assert side.cause == FAULTS[name].cause


def test_table_is_complete() -> None:
    """Every fault has a row, no side was reported wrongly, and in each mode 18 causes or more are named."""
    rows = faults.measured()
    assert rows.keys() == FAULTS.keys() and len(FAULTS) >= 24
    assert not [name for name, row in rows.items() for one in row.values() if one["wrong side"]]
    for mode in MODES:
        named = [cell(row[mode]) == "**yes**" for row in rows.values() if mode in row]
        assert sum(named) >= 18, mode
