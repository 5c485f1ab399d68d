"""Every fault of the catalogue is found by the property it names, and a healthy launch passes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proof.certify import faults
from tests.proof.certify.catalogue import FAULTS, LAUNCHES

#: Copies that differ, and a gradient that is wrong, in one launch.
QUICK = ("norm gains under SP", "balance of local tokens")


def _parameter(name: str) -> Any:
    quick = name in QUICK or FAULTS[name].stage in faults.STATIC
    return pytest.param(name, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize("name", [_parameter(name) for name in FAULTS])
def test_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    assert not faults.failures(faults.healthy(fault.launch, fault.stage)), "a healthy launch"
    found = faults.failures(faults.run(fault.launch, fault.stage, fault))
    assert "training" not in found, found["training"]  # a crash finds nothing
    assert set(fault.found_by) <= found.keys()


def test_catalogue_is_complete() -> None:
    """Thirty or more, each said in a sentence, with a row in the table."""
    assert len(FAULTS) >= 30
    assert len({fault.patch for fault in FAULTS.values()}) == len(FAULTS)
    assert all(fault.what.endswith(".") and fault.launch in LAUNCHES for fault in FAULTS.values())
    assert faults.measured().keys() == FAULTS.keys()
    for name, row in faults.measured().items():
        assert row["found by"] in FAULTS[name].found_by, name
