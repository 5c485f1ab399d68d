"""Megatron's options: what its parser takes, and its defaults.

`options.json` has every option of the supported versions: its type and number of values, the argument group
that it is in ("section"), its default where that is used, what `nemotron3 certify` does with it
("treatment"), and what it does on this stack ("effect", which `effects.py` reads).
`python -m tests.launch.make_options` writes it; a test compares it with the installed parser. An option that
it lacks, or has from a later publication ("source"), is looked up in the Megatron that Python imports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_nemotron3.common import parser as command_lines
from megatron_nemotron3.launch import installed_options, versions
from megatron_nemotron3.launch.flag import Flag, text

FILE = Path(__file__).with_name("options.json")
#: At most this many names are suggested for one that does not exist.
NEAREST = 3

Options = Mapping[str, tuple[str, ...]]


class Argument(NamedTuple):
    """An option of Megatron's parser."""

    #: "switch" takes no value; "int", "float", "text", "bool" and "choice", one of `choices`, take values.
    type: str
    #: argparse's number of values: "+" one or more, "*" any, "3"; "" is one.
    nargs: str = ""
    choices: tuple[str, ...] = ()
    #: Title of its argument group.
    section: str = ""
    #: As typed. None: it is not used here, or there is none.
    default: str | None = None
    #: An option, and perhaps its value, without which the default does not hold.
    default_with: tuple[str, ...] = ()
    #: Package without which `pretrain_hybrid.py` does not have the option.
    package: str | None = None
    #: Where it was published, if no parser that this table was read from has it.
    source: str | None = None


#: Options of recipes/omni/pretrain_omni.py, whose command line has the first one.
_OMNI = {
    "omni-encoders": Argument("text"),
    "vision-layout": Argument("text"),
    "sound-layout": Argument("text"),
    "omni-processor": Argument("text"),
    "omni-no-packing": Argument("switch"),
    "freeze": Argument("choice", "+", ("language", "vision", "vision-projector", "sound", "sound-projector")),
}


@cache
def table() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the content of `options.json`: "treatments", "effects" and "options", by name."""
    content: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


@cache
def _of_version(version: str) -> dict[str, Argument]:
    found = {}
    for name, row in table()["options"].items():
        if version in row.get("versions", versions.KNOWN):
            found[name] = _argument(row, row.get(version, row))
    return found


def _argument(row: Mapping[str, Any], taken: Mapping[str, Any]) -> Argument:
    return Argument(
        taken["type"],
        taken.get("nargs", ""),
        tuple(taken.get("choices", ())),
        row["section"],
        row.get("default"),
        tuple(row.get("default_with", ())),
        row.get("package"),
        row.get("source"),
    )


def argument(name: str, version: str) -> Argument | None:
    """Return an option ("--bf16") of the parser of minor version `version`; None if it has none."""
    bare = name.removeprefix("--")
    known = _of_version(version).get(bare)
    if (known and not known.source) or not installed_options.importable(version):
        return known
    row = installed_options.row(bare, version)
    return _argument(row, row) if row else None


def _known(name: str, version: str, omni: bool) -> Argument | None:
    return (_OMNI.get(name.removeprefix("--")) if omni else None) or argument(name, version)


def unlisted(names: Iterable[str], version: str) -> list[str]:
    """Return the options that the table lacks and the importable Megatron of minor version `version` has."""
    listed_names = table()["options"].keys() | _OMNI
    return [n for n in names if n.removeprefix("--") not in listed_names and argument(n, version)]


def argument_default(name: str) -> str | None:
    """Return the default in the file, of an option of any version, whatever other options are passed."""
    default: str | None = table()["options"][name.removeprefix("--")].get("default")
    return default


def treatment(name: str) -> str | None:
    """Return what certify does with an option of any version: a key of `table()["treatments"]`."""
    row = table()["options"].get(name.removeprefix("--"))
    return row["treatment"] if row else None


#: Options that a message names, and for which the nearest one is looked for.
_NAMED = 20


def unknown(names: Iterable[str], version: str) -> list[str]:
    """Return a sentence for each option that the parser of minor version `version` does not have."""
    given = list(names)
    lacking = [name for name in given if not _known(name, version, "--omni-encoders" in given)]
    return [*(_unknown(name, version) for name in lacking[:_NAMED]), *lacking[_NAMED:]]


def listed(found: Sequence[str], between: str = ", ") -> str:
    """Join the phrases of a message: the first ones, and how many follow."""
    more = [f"and {len(found) - _NAMED:,} more"] if len(found) > _NAMED else []
    return between.join([*found[:_NAMED], *more])


def foreign(names: Iterable[str]) -> list[str]:
    """Return the options that no version's parser has."""
    given = list(names)
    omni = "--omni-encoders" in given
    return [name for name in given if not any(_known(name, version, omni) for version in versions.KNOWN)]


def _unknown(name: str, version: str) -> str:
    if elsewhere := [v for v in versions.KNOWN if argument(name, v)]:
        why = f"new in {elsewhere[0]}" if elsewhere[0] > version else f"removed in {version}"
        return f"{name} ({why})"
    if known := _of_version(version).get(name.removeprefix("--")):
        return f"{name} ({known.source}, which the installed megatron-core does not have)"
    near = nearest(name.removeprefix("--"), version)
    return name + (f" (did you mean {' or '.join(near)}?)" if near else "")


def nearest(word: str, version: str) -> list[str]:
    """Return the options whose names are nearest to `word`, best first."""
    return [f"--{name}" for name in command_lines.nearest(word, _of_version(version), NEAREST)]


def misused(flags: Iterable[Flag], version: str) -> list[str]:
    """Return a sentence for each option whose number of values, or a value, the parser refuses."""
    given = ((flag, _known(flag.name, version, omni=True)) for flag in flags)
    return [f"{flag.name} {problem}" for flag, taken in given if taken and (problem := _problem(flag, taken))]


def _problem(flag: Flag, taken: Argument) -> str:
    """Return what is wrong with the values of one option, or ""."""
    given = f"{' '.join(flag.values):.200}"
    if taken.type == "switch":
        return f"takes no value, but is given {given}" if flag.values else ""
    if not flag.values and taken.nargs != "*":
        return "needs a value"
    if taken.nargs.isdecimal() and len(flag.values) != int(taken.nargs):
        return f"takes {taken.nargs} values, but is given {len(flag.values)}: {given}"
    if not taken.nargs and len(flag.values) > 1:
        return f"takes one value, but is given {len(flag.values)}: {given}"
    return next((problem for value in flag.values if (problem := _wrong_value(value, taken))), "")


_NUMBERS = {"int": (int, "an integer"), "float": (float, "a number")}
_FALSE = ("false", "no", "0", "off")


def _wrong_value(value: str, taken: Argument) -> str:
    """Return what is wrong with one value, or ""."""
    if taken.type in _NUMBERS:
        number, what = _NUMBERS[taken.type]
        try:
            return "" if math.isfinite(number(value)) else f"{value}: give a finite number"
        except (ValueError, OverflowError):
            return f"{value}: give {what}"
    if taken.type == "bool" and value.lower() in _FALSE:
        return f"{value}: the parser reads any word as true; drop the option"
    if taken.type == "choice" and value not in taken.choices:
        return f"{value}: choose {', '.join(taken.choices)}"
    return ""


def _first_value(options: Options, name: str) -> str | None:
    return (options.get(name) or (None,))[0]


def _kv_channels(options: Options) -> str | None:
    hidden, heads = _first_value(options, "--hidden-size"), _first_value(options, "--num-attention-heads")
    if not (hidden and heads and hidden.isdecimal() and heads.isdecimal() and int(heads)):
        return None
    return str(int(hidden) // int(heads))


#: Option -> how Megatron derives it from others (validate_args of megatron/training/arguments.py).
_DERIVED: dict[str, Callable[[Options], str | None]] = {
    "--kv-channels": _kv_channels,
    "--moe-ffn-hidden-size": lambda options: _first_value(options, "--ffn-hidden-size"),
    "--expert-tensor-parallel-size": lambda options: (
        _first_value(options, "--tensor-model-parallel-size") or "1"
    ),
}


def default(name: str, options: Options) -> str | None:
    """Return the value of an option that a command line of `options` does not pass; None if it has none.

    Only options that describe a model and its training have a default here, that of the oldest version.
    """
    if name in _DERIVED:
        return _DERIVED[name](options)
    found = argument(name, versions.KNOWN[0])
    return found.default if found and _holds(found, options) else None


def _holds(found: Argument, options: Options) -> bool:
    if not found.default_with:
        return True
    other, *values = found.default_with
    return other in options and tuple(values) in ((), options[other])


def is_default(name: str, options: Options) -> bool:
    """Whether an option changes nothing: its value is the default, or the option it refines is missing."""
    found = argument(name, versions.KNOWN[0])
    if found is None or found.default is None:
        return False
    return not _holds(found, options) if found.default_with else options[name] == (found.default,)


#: Field -> option, where the names differ.
_NAMES = {
    "num_moe_experts": "num-experts",
    "layernorm_epsilon": "norm-epsilon",
    "gated_linear_unit": "swiglu",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "use_te_rng_tracker": "te-rng-tracker",
}
#: Field -> the switch that turns it off.
_OFF = {
    "add_bias_linear": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "grad_reduce_in_fp32": "grad-reduce-in-bf16",
}
#: Fields that say nothing about the options of their names.
_NO_OPTION = ("bf16", "fp16", "params_dtype")


def option_of(field: str) -> str:
    """Return the option, with its dashes, that a field belongs to, whether it exists or not."""
    return "--" + (_OFF.get(field) or _NAMES.get(field) or field.replace("_", "-"))


def options_of(fields: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the options that fields of Megatron's configuration or stored arguments stand for.

    A field without an option is left out, and so is one whose value means that the option is not passed.
    """
    found: dict[str, tuple[str, ...]] = {}
    for field, value in fields.items():
        option = option_of(str(field))
        known = argument(option, versions.KNOWN[0])
        if known is None or known.package or field in _NO_OPTION or value is None:
            continue
        if known.type == "switch":
            if value is (field not in _OFF):
                found[option] = ()
        elif isinstance(value, (str, int, float, list, tuple)) and not isinstance(value, bool):
            values = value if isinstance(value, (list, tuple)) else (value,)
            if known.type == "int":  # a whole number may be stored as a float
                values = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
            if words := tuple(map(text, values)):
                found[option] = words
    if "squared_relu" in str(fields.get("activation_func")):
        found["--squared-relu"] = ()
    heads, groups = found.get("--num-attention-heads"), found.get("--num-query-groups")
    if groups and groups != heads and "group_query_attention" not in fields:
        found["--group-query-attention"] = ()
    if found.get("--mtp-num-layers") == ("0",):
        del found["--mtp-num-layers"]
    return found
