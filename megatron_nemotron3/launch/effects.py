"""What Megatron's options do on this stack, where it is not what they do on a GPT model.

`options.json` has an effect for every option of the supported versions, and says in "effects" what each of
them is. They were found in megatron-core 0.19.2; tests/launch/test_effects.py compares them with its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from megatron_nemotron3.launch import parser
from megatron_nemotron3.launch.flag import values_by_name
from megatron_nemotron3.launch.rule import Severity

#: Kind of effect -> how bad it is. "works", "ruled" (a rule of its own) and "unknown" say nothing.
#: refused: the run would compute something else than asked, or end; unused: it changes nothing;
#: benchmark: no training should have it; layout: what it does depends on the layout.
SEVERITY: dict[str, Severity] = {
    "refused": "error",
    "benchmark": "warning",
    "unused": "note",
    "layout": "note",
}


class Effect(NamedTuple):
    """What options have in common that do not work as on a GPT model."""

    #: A key of `SEVERITY`, or "works", "ruled", "unknown".
    effect: str
    why: str = ""
    instead: str = ""
    #: The file that shows it, of megatron-core unless it is ours.
    source: str = ""
    #: "torch": on that backend only.
    backend: str = ""
    #: Values that have the effect; (): all.
    values: tuple[str, ...] = ()
    #: Options, perhaps with a value, with which there is none.
    unless: tuple[str, ...] = ()
    #: A letter of the pattern: on models with such layers only.
    layer: str = ""


@cache
def _effects() -> dict[str, Effect]:
    found = {}
    for name, row in parser.table()["effects"].items():
        texts = (row.get(key, "") for key in ("why", "instead", "source", "backend"))
        lists = (tuple(row.get(key, ())) for key in ("values", "unless"))
        found[name] = Effect(row["effect"], *texts, *lists)._replace(layer=row.get("layer", ""))
    return found


def effect(name: str) -> Effect | None:
    """Return the effect of an option of any version; None if no version has it."""
    row = parser.table()["options"].get(name.removeprefix("--"))
    return _effects()[row["effect"]] if row else None


def sentences(kind: str, options: Mapping[str, tuple[str, ...]], backend: str) -> list[str]:
    """Return a sentence for each effect of a kind, with the options of a command line that have it."""
    said: dict[Effect, list[str]] = {}
    for name, values in options.items():
        found = effect(name)
        if found and found.effect == kind and _applies(found, name, options, backend):
            said.setdefault(found, []).append(" ".join((name, *values)) if found.values else name)
    return [f"{', '.join(names)}: {e.why}: {e.instead} ({e.source})" for e, names in said.items()]


def said_of(argv: Sequence[str], backend: str) -> list[tuple[Severity, str]]:
    """Return (severity, sentence) of all effects of a command line."""
    options = values_by_name(argv)
    kinds = SEVERITY.items()
    return [(how, said) for kind, how in kinds for said in sentences(kind, options, backend)]


def _applies(found: Effect, name: str, options: Mapping[str, tuple[str, ...]], backend: str) -> bool:
    if found.backend and found.backend != backend:
        return False
    pattern = (options.get("--hybrid-layer-pattern") or ("",))[0]
    if found.layer and pattern and found.layer not in pattern:
        return False
    if any(options.get(other) == tuple(value) for other, *value in map(str.split, found.unless)):
        return False
    if found.values:
        return not set(found.values).isdisjoint(options[name])
    return not _is_default(options[name], parser.argument_default(name))


def _is_default(values: tuple[str, ...], default: str | None) -> bool:
    if default is None or len(values) != 1:
        return False
    try:
        return float(values[0]) == float(default)
    except ValueError:
        return values[0] == default
