"""Every fault of the catalogue is found by the property it names, and a healthy launch passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certify import faults
from tests.certify.faults import FAULTS

#: One of each kind: a sum that is missing, a number that is wrong, a state that is old.
QUICK = ("norm gains under SP", "balance of local tokens")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in FAULTS]
)
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
    assert all(fault.what.endswith(".") and fault.launch in faults.LAUNCHES for fault in FAULTS.values())
    assert faults.measured().keys() == FAULTS.keys()
    for name, row in faults.measured().items():
        assert row["found by"] in FAULTS[name].found_by, name


def test_fault_of_nobody_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such fault: nothing"):
        faults.main(["nothing"])
