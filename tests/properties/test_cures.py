"""The cure a message names, applied, ends the violation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from megatron_nemotron3.launch import Launch, Violation, check
from tests.properties.evidence import EVIDENCE
from tests.properties.step import Case
from tests.properties.strategies import misfits

Cure = Callable[[Case, int], Case]


def _size(name: str) -> Cure:
    return lambda case, value: replace(case, layout=replace(case.layout, **{name: value}))


def _schedule(name: str) -> Cure:
    return lambda case, value: replace(case, schedule=replace(case.schedule, **{name: value}))


def _option(name: str) -> Cure:
    return lambda case, value: replace(case, extra=(*case.extra, name, str(value)))


def _stages(case: Case, stages: int) -> Case:
    return replace(case, layout=replace(case.layout, pp=stages, vpp=1))


#: Rule, or "" for any -> what its message says, and what that means. A multiple is tried once and threefold.
CURES: tuple[tuple[str, str, Cure], ...] = (
    *(("", rf"\buse {name} ([\d, ]*\d)", _size(name.lower())) for name in ("TP", "CP", "EP", "ETP")),
    ("query-groups-tp", r"or a multiple of (\d+)", _size("tp")),
    ("mamba-groups-cp", r"or a multiple of (\d+)", _size("cp")),
    ("expert-grid", r"raise DP to a multiple of (\d+)", _size("dp")),
    ("fsdp-pipeline", r"use PP (1)", _stages),
    ("layers-pipeline", r"use PP\*VPP <= (\d+)", _stages),
    ("sequence-cp", r"use a multiple of (\d+)", _schedule("seq_length")),
    ("sequence-sp", r"use a multiple of (\d+)", _schedule("seq_length")),
    ("global-batch", r"use a multiple of (\d+)", _schedule("global_batch_size")),
    ("vpp-microbatches", r"global_batch_size that is a multiple of (\d+)", _schedule("global_batch_size")),
    ("token-alignment", r"seq_length that is a multiple of (\d+)", _schedule("seq_length")),
    (
        "fp8-bf16-layers-pipeline",
        r"--num-layers-at-end-in-bf16 (\d+)",
        _option("--num-layers-at-end-in-bf16"),
    ),
    ("recompute-mtp", r"--recompute-num-layers (\d+)", _option("--recompute-num-layers")),
)


def violations(case: Case) -> list[Violation]:
    options = case.options()
    options.pop("distributed_optimizer")
    return check(Launch.of(case.config, case.layout, **options))


def cured(case: Case, violation: Violation) -> Iterator[tuple[str, Case]]:
    """The case after each cure the message names."""
    for rule, said, apply in CURES:
        if rule not in ("", violation.rule) or not (found := re.search(said, violation.message)):
            continue
        values = [int(value) for value in found[1].split(",")]
        if "multiple" in said:
            values.append(3 * values[0])
        for value in values:
            yield f"{found[0]} ({value})", apply(case, value)


def check_cures(case: Case) -> set[str]:
    """Rules whose cure was tried."""
    tried = set()
    for violation in violations(case):
        for said, other in cured(case, violation):
            tried.add(violation.rule)
            left = {v.rule for v in violations(other)}
            assert violation.rule not in left, f"{violation}\nafter: {said}"
    return tried


@settings(
    max_examples=50,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(misfits())
def test_cures_work(case: Case) -> None:
    check_cures(case)


def test_every_cure_with_a_number_is_tried() -> None:
    """On the runs of the evidence table: a number after "use", "raise" or "pass" is one of `CURES`."""
    named = {
        rule
        for rule, evidence in EVIDENCE.items()
        for violation in violations(evidence.case)
        if violation.rule == rule
        and re.search(r"(use [A-Z*]+ (<= )?\d|a multiple of \d|-in-bf16 \d|num-layers \d)", violation.message)
    }
    tried = {rule for evidence in EVIDENCE.values() for rule in check_cures(evidence.case)}
    assert named <= tried
    assert len(tried) >= 18
