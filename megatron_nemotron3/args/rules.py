"""One table of everything known not to work, and what checks it. Standard library only.

`check` reports, `enforce` raises on errors with all of them in one message. Each rule has a name, the
numbers, the cure and the place in Megatron-Core 0.19 (or the report or issue) it comes from. `RULES` hold for
every version; what only some versions refuse is in `rules_version`.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_nemotron3.args.backend import BACKENDS
from megatron_nemotron3.args.flag import parse
from megatron_nemotron3.args.layout import ParallelLayout
from megatron_nemotron3.args.precision import PRECISIONS
from megatron_nemotron3.args.rule import Context, Rule, Violation
from megatron_nemotron3.args.rules_combination import COMBINATION_RULES
from megatron_nemotron3.args.rules_layout import LAYOUT_RULES
from megatron_nemotron3.args.rules_options import OPTION_RULES
from megatron_nemotron3.args.rules_precision import PRECISION_RULES
from megatron_nemotron3.args.rules_schedule import SCHEDULE_RULES
from megatron_nemotron3.args.rules_version import VERSION_RULES
from megatron_nemotron3.args.schedule import TrainingSchedule
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.versions import chosen

RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    *SCHEDULE_RULES,
    *PRECISION_RULES,
    *OPTION_RULES,
    *COMBINATION_RULES,
)


class RuleError(ValueError):
    """At least one rule of severity "error" is violated. `violations` holds all errors."""

    def __init__(self, config: Nemotron3Config, layout: ParallelLayout, violations: Sequence[Violation]):
        self.violations = tuple(violations)
        head = f"{config.name} on {layout} ({layout.world_size} ranks) cannot be launched:"
        super().__init__("\n".join((head, *(f"  - {violation}" for violation in violations))))


def check(
    config: Nemotron3Config,
    layout: ParallelLayout,
    precision: str = "bf16",
    backend: str = "auto",
    schedule: TrainingSchedule | None = None,
    *,
    extra: Sequence[str] = (),
    te_precision_config_file: str | None = None,
    allow_plain_nvfp4: bool = False,
    emulate: bool = False,
    compute_capability: tuple[int, int] | None = None,
    megatron_core: str | None = None,
) -> list[Violation]:
    """Every violated rule, errors before warnings. Arguments as in `flags.flags`.

    Raises:
        ValueError: an unknown precision, backend or megatron-core, or `extra` that starts with a value.
    """
    for what, value, known in (("precision", precision, PRECISIONS), ("backend", backend, BACKENDS)):
        if value not in known:
            raise ValueError(f"unknown {what} {value!r}: use one of {', '.join(known)}")
    context = Context(
        config=config,
        layout=layout,
        precision=precision,
        backend=backend,
        schedule=schedule,
        options={flag.name: flag.values for flag in parse(extra)},
        te_precision_config_file=te_precision_config_file,
        allow_plain_nvfp4=allow_plain_nvfp4,
        emulate=emulate,
        compute_capability=compute_capability,
        megatron_core=chosen(megatron_core),
    )
    violations = [
        Violation(rule.name, rule.severity, rule.message(context), rule.source)
        for rule in (*RULES, *VERSION_RULES)
        if rule.violated(context)
    ]
    return sorted(violations, key=lambda violation: violation.severity)  # stable; "error" < "warning"


def enforce(
    config: Nemotron3Config,
    layout: ParallelLayout,
    precision: str = "bf16",
    backend: str = "auto",
    schedule: TrainingSchedule | None = None,
    *,
    extra: Sequence[str] = (),
    te_precision_config_file: str | None = None,
    allow_plain_nvfp4: bool = False,
    emulate: bool = False,
    compute_capability: tuple[int, int] | None = None,
    megatron_core: str | None = None,
) -> list[Violation]:
    """Raise on errors, return the warnings.

    Raises:
        RuleError: with every violated rule of severity "error".
    """
    violations = check(
        config,
        layout,
        precision,
        backend,
        schedule,
        extra=extra,
        te_precision_config_file=te_precision_config_file,
        allow_plain_nvfp4=allow_plain_nvfp4,
        emulate=emulate,
        compute_capability=compute_capability,
        megatron_core=megatron_core,
    )
    errors = [violation for violation in violations if violation.severity == "error"]
    if errors:
        raise RuleError(config, layout, errors)
    return violations
