"""What the stages of a proof work with (the launch, its proxy, a folder), and what they say of a property."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_nemotron3.launch import ParallelLayout, TrainingSchedule, pasted
from megatron_nemotron3.launch.flag import Flag
from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.layouts import Sizes
from megatron_nemotron3.proof.certify.proxy import ProxyLaunch


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


def with_other_data(
    findings: Callable[[int], Iterable[Finding]], tied: Callable[[int], bool], tries: int
) -> list[Finding]:
    """Findings with the first data, or with others where a comparison failed and rounding decides.

    Args:
        findings, tied: number of the data -> findings; whether a token has two experts of nearly equal rank.
    """
    found: list[Finding] = []
    for number in range(tries):
        found = list(findings(number))
        failures = [one for one in found if one.state is PropertyState.FAIL]
        # A failure without a number is none of a comparison: a rank that ended, copies that differ.
        compared = bool(failures) and all(one.difference is not None for one in failures)
        if not compared or number == tries - 1 or not tied(number):
            break
    return found


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the stages of a proof work with."""

    proxy: ProxyLaunch
    #: Options of the launch, each once.
    flags: tuple[Flag, ...]
    #: An empty folder for checkpoints and logs.
    folder: Path
    #: What the launch emulates.
    emulate: Emulation | None = None
    #: Type of the GPUs of the launch, a name of `launch.plan.hardware.GPUS`; None: unknown.
    gpu: str | None = None
    #: Megatron-LM whose script the launch runs; None: this package's script.
    checkout: Path | None = None
    #: Megatron-LM that is compared with the installed one.
    against: Path | None = None
    #: Seconds after which a run counts as hung.
    timeout: float = 300
    #: Importable function called on every rank before anything is built. Tests break something with it.
    fault: Callable[[], None] | None = None

    def case(self, sizes: Sizes | None, **changes: Any) -> TrainingCase:
        """Return the training of the proxy in a layout, or in one process (None)."""
        own = {"arguments": tuple(self.proxy.arguments(sizes)), "fault": self.fault}
        return self.proxy.case.at(sizes.layout if sizes else ParallelLayout(), **(own | changes))

    @cached_property
    def launch(self) -> Launch | None:
        """The real launch; None if a size of its layout is no number."""
        given = {flag.name: flag.values for flag in self.flags}

        def number(name: str) -> int | None:
            word = (given.get(name) or ("",))[0]
            return int(word) if word.isdecimal() else None

        schedule = TrainingSchedule(
            seq_length=number("--seq-length"),
            micro_batch_size=number("--micro-batch-size") or 1,
            global_batch_size=number("--global-batch-size"),
        )
        model, layout = self.proxy.model, self.proxy.large.layout
        return pasted.launch_of(model, self.flags, self.emulate, schedule, layout, whole=True)

    @property
    def ranks(self) -> int:
        return sum(sizes.layout.world_size for sizes in self.proxy.sizes)


def last_line(problem: BaseException) -> str:
    """Return what an exception says; of a traceback the last line."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[-1]
