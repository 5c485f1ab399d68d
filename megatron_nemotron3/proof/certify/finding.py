"""What a proof says of one property."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PropertyState(enum.Enum):
    """The verdict on a property."""

    PASS = "pass"
    FAIL = "fail"
    UNTESTED = "not testable here"


@dataclass(frozen=True)
class Finding:
    """The verdict on one property of a launch."""

    #: "gradients", "weights after resuming"…
    name: str
    state: PropertyState
    #: The layout in which it was tried, as the certificate prints it; "" where it concerns none or all.
    where: str = ""
    #: Largest difference found, and the largest that rounding explains. None where nothing was measured.
    difference: float | None = None
    tolerance: float | None = None
    #: What differs, why it cannot be tested here, or what was compared.
    detail: str = ""


def passed(name: str, where: str = "", detail: str = "") -> Finding:
    """Return a finding of something that holds without a number."""
    return Finding(name, PropertyState.PASS, where, detail=detail)


def failed(name: str, where: str = "", detail: str = "") -> Finding:
    """Return a finding of something that does not hold."""
    return Finding(name, PropertyState.FAIL, where, detail=detail)


def untested(name: str, detail: str, where: str = "") -> Finding:
    """Return a finding of something that a machine without GPUs cannot try."""
    return Finding(name, PropertyState.UNTESTED, where, detail=detail)
