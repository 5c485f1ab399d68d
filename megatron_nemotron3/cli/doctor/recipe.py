"""Findings about environment variables that change the recipe of a number format. Standard library only."""

from __future__ import annotations

from megatron_nemotron3.cli.doctor.finding import Finding
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision import settings, te_variables


def findings() -> list[Finding]:
    """The NVFP4 recipe that this environment gives, every variable that changes it, and emulation."""
    remarks = te_variables.remarks(version=te_variables.te_version())
    deviates = any(remark.deviates or remark.fails for remark in remarks)
    found = [
        Finding(
            "nvfp4",
            "warning" if deviates else "ok",
            f"recipe in force on FP4 hardware: {te_variables.nvfp4_ingredients()}"
            + ("" if deviates else " (as published)"),
        )
    ]
    for remark in remarks:
        level = "warning" if remark.deviates or remark.fails else "ok"
        cure = f"unset {remark.name}"
        found.append(Finding(f"{remark.name}={remark.value}", level, remark.text, cure))  # type: ignore[arg-type]
    try:
        emulated = settings.emulation_in_environment()
    except ValueError as problem:
        found.append(Finding(EMULATE, "error", str(problem), f"unset {EMULATE}"))
    else:
        if emulated is not None:
            found.append(Finding(EMULATE, "ok", f"the torch backend emulates {emulated.text()}"))
    return found
