"""The finding about emulation of number formats. Standard library only."""

from __future__ import annotations

from megatron_nemotron3.cli.doctor.finding import DoctorFinding
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision import settings


def findings() -> list[DoctorFinding]:
    """What NEMOTRON3_EMULATE says; none where it is not set."""
    try:
        emulated = settings.emulation_in_environment()
    except ValueError as problem:
        return [DoctorFinding(EMULATE, "error", str(problem), f"unset {EMULATE}")]
    if emulated is None:
        return []
    return [DoctorFinding(EMULATE, "ok", f"the torch backend emulates {emulated.text()}")]
