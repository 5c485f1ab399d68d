"""All rules in one table, and what applies them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.rule import Rule, Severity, Violation
from megatron_nemotron3.launch.rules_layout import LAYOUT_RULES
from megatron_nemotron3.launch.rules_options import OPTION_RULES, PARSER_RULES, VERSION_RULES
from megatron_nemotron3.launch.rules_performance import PERFORMANCE_RULES
from megatron_nemotron3.launch.rules_precision import PRECISION_RULES
from megatron_nemotron3.launch.rules_schedule import SCHEDULE_RULES

#: Rules for every version of megatron-core; `VERSION_RULES` depend on it.
RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    *SCHEDULE_RULES,
    *PRECISION_RULES,
    *OPTION_RULES,
    *PERFORMANCE_RULES,
)


class RuleError(ValueError):
    """A launch violates at least one rule of severity "error". `violations` holds all of them."""

    def __init__(self, launch: Launch, violations: Sequence[Violation]):
        self.violations = tuple(violations)
        layout = launch.layout
        head = f"{launch.config.name} on {layout} ({layout.world_size} ranks) cannot be launched:"
        super().__init__("\n".join((head, *(f"  - {violation}" for violation in violations))))


def check(launch: Launch) -> list[Violation]:
    """Return every violated rule, errors before warnings before notes.

    If the parser refuses options of `extra`, only that is returned: other rules read their values.
    """
    return _violated(PARSER_RULES, launch) or _violated((*RULES, *VERSION_RULES), launch)


def _violated(rules: Iterable[Rule], launch: Launch) -> list[Violation]:
    violations = [
        Violation(rule.name, rule.severity, rule.message(launch), rule.source)
        for rule in rules
        if rule.violated(launch)
    ]
    return sorted(violations, key=lambda violation: get_args(Severity).index(violation.severity))  # stable


def enforce(launch: Launch) -> None:
    """Raise a RuleError if a rule of severity "error" is violated."""
    errors = [violation for violation in check(launch) if violation.severity == "error"]
    if errors:
        raise RuleError(launch, errors)
