"""What the rules refuse Megatron refuses too or computes wrongly, or the table says why none can tell."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from megatron_nemotron3.launch import RULES, Launch, RuleError, check, flags, versions
from megatron_nemotron3.launch.rules_options import _GPT_LAYOUT
from megatron_nemotron3.models import count
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.properties.entries import Refused, Wrong
from tests.properties.evidence import EVIDENCE
from tests.properties.evidence_combination import COMBINATIONS
from tests.properties.measure import _GPT_VALUES, attempts, nothing
from tests.properties.step import Case, Refusal
from tests.properties.strategies import draw_many, errors, refused


def launch(case: Case) -> Launch:
    options = case.options()
    options.pop("distributed_optimizer")
    return Launch.of(case.config, case.layout, **options)


def test_every_rule_has_evidence() -> None:
    names = [rule.name for rule in RULES]
    assert set(names) == set(EVIDENCE) and len(set(names)) == len(names)


@pytest.mark.parametrize("rule", EVIDENCE)
def test_the_run_is_about_this_rule(rule: str) -> None:
    """The rule fires; an error ends `flags`, a warning does not. docs/reference/rules.md has what it says."""
    evidence = EVIDENCE[rule]
    asked = launch(evidence.case)
    found = {violation.rule: violation for violation in check(asked)}
    assert set(found) == {rule, *evidence.along}
    severity = next(one.severity for one in RULES if one.name == rule)
    assert found[rule].severity == severity
    if severity == "error":
        with pytest.raises(RuleError, match=re.escape(rule)):
            flags(asked)
    elif not any(violation.severity == "error" for violation in found.values()):
        assert flags(asked)


@functools.cache
def made(ranks: int) -> dict[str, Any]:
    """Rule -> what Megatron made of its run on that many ranks, on the first."""
    names = [n for n, e in EVIDENCE.items() if isinstance(e, Refused) and e.case.layout.world_size == ranks]
    entries = [EVIDENCE[name] for name in names]
    pretend = [entry.pretend for entry in entries if isinstance(entry, Refused)]
    found = run_distributed(attempts, ranks, [entry.case for entry in entries], pretend)
    return dict(zip(names, found[0], strict=True))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(name, marks=pytest.mark.full if e.case.layout.world_size > 2 else ())
        for name, e in EVIDENCE.items()
        if isinstance(e, Refused)
    ],
)
def test_megatron_refuses_too(rule: str) -> None:
    evidence = EVIDENCE[rule]
    assert isinstance(evidence, Refused)
    result = made(evidence.case.layout.world_size)[rule]
    assert isinstance(result, Refusal), result
    assert result.stage == evidence.stage
    assert evidence.message in result.message


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(name, marks=pytest.mark.full if name in COMBINATIONS else ())
        for name, e in EVIDENCE.items()
        if isinstance(e, Wrong)
    ],
)
def test_megatron_computes_something_else(rule: str) -> None:
    from megatron.core import __version__

    if rule == "reshardable-buckets" and versions.minor(__version__) != "0.19":
        pytest.skip("mended after 0.19, where the rule no longer holds")
    evidence = EVIDENCE[rule]
    assert isinstance(evidence, Wrong)
    assert evidence.measured(evidence.case) == evidence.shown


def test_every_gpt_option_is_tried() -> None:
    assert set(_GPT_VALUES) == set(_GPT_LAYOUT)


def is_wrong(case: Case, result: Any) -> bool:
    """Refused, or another number of weights than meant."""
    return isinstance(result, Refusal) or result.parameters != count(case.config).trainable


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "number"),
    [(2, 80), (4, 80)],
)
def test_random_runs_that_are_refused_do_not_work(ranks: int, number: int) -> None:
    """On one pipeline stage, where a rank that gives up leaves none waiting for it."""
    cases = draw_many(refused(ranks).filter(lambda case: case.layout.pp == 1), number)
    results = run_distributed(attempts, ranks, cases, [nothing] * number)[0]
    works = {str(c): errors(c) for c, result in zip(cases, results, strict=True) if not is_wrong(c, result)}
    assert not works
