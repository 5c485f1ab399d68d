"""Whether Megatron's parser takes an option with its values, without Megatron. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from megatron_nemotron3.args import parser_table, versions
from megatron_nemotron3.args.flag import Flag
from megatron_nemotron3.common import options as command_lines

#: At most this many names are suggested for one that does not exist.
NEAREST = 3
_READS = {"int": (int, "an integer"), "float": (float, "a number")}
_FALSE = ("false", "no", "0", "off")


#: Options of recipes/omni/pretrain_omni.py, whose command line has the first one.
OMNI = {
    "omni-encoders": "text",
    "vision-layout": "text",
    "sound-layout": "text",
    "omni-processor": "text",
    "omni-no-packing": "switch",
    "freeze": "language|vision|vision-projector|sound|sound-projector +",
}


@lru_cache
def _known(version: str, omni: bool = False) -> dict[str, str]:
    known = parser_table.options(version) | parser_table.section(parser_table.MODELOPT)
    return known | OMNI if omni else known


def unknown(names: Iterable[str], version: str) -> list[str]:
    """Return a sentence for each option that the parser of minor version `version` does not have."""
    given = list(names)
    known = _known(version, "--omni-encoders" in given)
    return [_unknown(name, version) for name in given if name.removeprefix("--") not in known]


def _unknown(name: str, version: str) -> str:
    word = name.removeprefix("--")
    if elsewhere := [v for v in versions.KNOWN if word in _known(v)]:
        why = f"new in {elsewhere[0]}" if elsewhere[0] > version else f"removed in {version}"
        return f"{name} ({why})"
    near = nearest(word, version)
    return name + (f" (did you mean {' or '.join(near)}?)" if near else "")


def nearest(word: str, version: str) -> list[str]:
    """Return the options whose names are nearest to `word`, best first."""
    return [f"--{name}" for name in command_lines.nearest(word, _known(version), NEAREST)]


def misused(flags: Iterable[Flag], version: str) -> list[str]:
    """Return a sentence for each option whose number of values, or a value, the parser refuses."""
    known = _known(version, omni=True)
    kinds = ((flag, known.get(flag.name.removeprefix("--"))) for flag in flags)
    return [f"{flag.name} {problem}" for flag, kind in kinds if kind and (problem := _problem(flag, kind))]


def _problem(flag: Flag, kind: str) -> str:
    """Return what is wrong with the values of one option, or ""."""
    given = " ".join(flag.values)
    if kind == "switch":
        return f"takes no value, but is given {given}" if flag.values else ""
    takes, _, many = kind.partition(" ")
    if not flag.values and many != "*":
        return "needs a value"
    if many.isdecimal() and len(flag.values) != int(many):
        return f"takes {many} values, but is given {len(flag.values)}: {given}"
    if not many and len(flag.values) > 1:
        return f"takes one value, but is given {len(flag.values)}: {given}"
    return next((problem for value in flag.values if (problem := _wrong_value(value, takes))), "")


def _wrong_value(value: str, takes: str) -> str:
    """Return what is wrong with one value, or ""."""
    if takes in _READS:
        read, what = _READS[takes]
        try:
            return "" if math.isfinite(read(value)) else f"{value}: give a finite number"
        except (ValueError, OverflowError):
            return f"{value}: give {what}"
    if takes == "bool" and value.lower() in _FALSE:
        return f"{value}: the parser reads any word as true; drop the option"
    if takes not in ("text", "bool") and value not in takes.split("|"):
        return f"{value}: choose {', '.join(takes.split('|'))}"
    return ""


def repeated(flags: Sequence[Flag]) -> list[str]:
    """Return a sentence for each option that is given more than once with different values."""
    values: dict[str, set[tuple[str, ...]]] = {}
    for flag in flags:
        values.setdefault(flag.name, set()).add(flag.values)
    last = {flag.name: str(flag) for flag in flags}
    return [
        f"{name} is given {len(found)} times with different values: the last one counts, {last[name]}"
        for name, found in values.items()
        if len(found) > 1
    ]
