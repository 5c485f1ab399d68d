"""docs/refused.md, from the rules and their evidence: `python -m tests.properties.page > docs/refused.md`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_nemotron3.args import RULES, Violation, check
from tests.properties.entries import Evidence, NotShown, Refused
from tests.properties.evidence import EVIDENCE

_HEAD = """\
# What is refused, and what would happen otherwise

`nemotron3 flags` and `train` refuse a run that breaks one of the rules of
`megatron_nemotron3/args/rules*.py`, and print a warning for others. Every row is a run of a few hundred
weights that breaks the rule, made by `tests/properties/evidence.py` and tested there: what the rule says to
it, and what Megatron-Core 0.19 does with it when the rules are off.

- *refuses*: Megatron ends the run itself, with the words quoted. The rule says so before anything starts.
- *takes it*: Megatron runs, and does something else than asked; the number was measured.
- *not shown*: only a GPU with Transformer Engine (TE) could tell; the last column says where it is written.

This page is generated: `python -m tests.properties.page > docs/refused.md`, from the root of a checkout.
"""


def markdown() -> str:
    """The page."""
    errors = [rule.name for rule in RULES if rule.severity == "error"]
    warnings = [rule.name for rule in RULES if rule.severity == "warning"]
    parts = (_HEAD, f"## Errors ({len(errors)})\n", *_table(errors), "")
    rest = (f"## Warnings ({len(warnings)})\n", *_table(warnings))
    return "\n".join((*parts, *rest)) + "\n"


def _table(names: list[str]) -> Iterator[str]:
    yield "| rule | what it says, for example | Megatron without it | where |"
    yield "|-|-|-|-|"
    for name in names:
        evidence = EVIDENCE[name]
        said = _violation(name, evidence)
        cells = (f"`{name}`", said.message, _finding(evidence), said.source)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _violation(name: str, evidence: Evidence) -> Violation:
    options = evidence.case.options()
    options.pop("distributed_optimizer")
    found = check(evidence.case.config, evidence.case.layout, **options)
    return next(violation for violation in found if violation.rule == name)


def _finding(evidence: Evidence) -> str:
    if isinstance(evidence, Refused):
        return f"{evidence.kind}: `{evidence.message}`"
    if isinstance(evidence, NotShown):
        return f"not shown: {evidence.why}"
    return f"takes it: {evidence.shown}"


if __name__ == "__main__":
    print(markdown(), end="")
