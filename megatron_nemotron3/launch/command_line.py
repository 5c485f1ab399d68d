"""Read the Megatron options out of the text of an existing launch.

The text is one command (`torchrun … pretrain_hybrid.py --a 1 \\ …`), options alone, a shell script that
collects options in arrays or quoted strings (`script`), or YAML (`yaml_launch`). Variables that the text
assigns are replaced by their values; others keep their `$` (`is_known`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_nemotron3.common.switches import BOOST, EMULATE, LORA
from megatron_nemotron3.launch import yaml_launch
from megatron_nemotron3.launch.flag import Flag
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.launch.script import follow, is_known
from megatron_nemotron3.precision.settings import OPTION, Emulation, parse_emulation

#: Variable of this package -> where a text sets it; emulation has an option of our launcher, too.
_SETTINGS = {
    name: re.compile(rf"(?<!\S)(?:export\s+)?(?:{form})([^\s\\]+)")
    for name, form in (
        (EMULATE, rf"{OPTION}[=\s]\s*|{EMULATE}="),
        (LORA, f"{LORA}="),
        (BOOST, f"{BOOST}="),
    )
}
_SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}
_PATTERN, _DEPTHS = "--hybrid-layer-pattern", "--mtp-num-layers"
_OLD_PATTERN, _OLD_MTP = "--hybrid-override-pattern", "--mtp-hybrid-override-pattern"


@dataclass(frozen=True)
class LaunchText:
    """The options and the size of a launch, read from its text."""

    #: Its options, each once.
    flags: list[Flag]
    #: Remarks on how it was read.
    notes: list[str]
    #: Ranks that it starts, by the options of torchrun or Slurm; None if unknown.
    world_size: int | None = None


def read_launch(text: str, variables: Mapping[str, str] | None = None) -> LaunchText:
    """Read the text of a launch. Of an option that it gives more than once the last counts, as for argparse.

    Raises:
        ValueError: the text has no option, or as `script.follow`.
    """
    if yaml_launch.is_yaml(text):
        if variables:
            raise ValueError("--set sets variables of a shell script, and the text is YAML")
        (found, notes), ranks = yaml_launch.read(text), None
    else:
        followed = follow(text, variables)
        found, notes, ranks = followed.options, followed.notes, followed.world_size
    if not found:
        raise ValueError(
            "no Megatron option in the text: paste the command as it was run, pretrain_hybrid.py --…"
        )
    notes = [*_rename_patterns(found), *notes]
    return LaunchText([Flag(name, values) for name, values in found.items()], notes, ranks)


def _rename_patterns(options: dict[str, tuple[str, ...]]) -> list[str]:
    """Turn layer patterns of older releases into `--hybrid-layer-pattern`, as the parser does; remarks."""
    old = {_OLD_PATTERN: _PATTERN, _OLD_MTP: f"the part of {_PATTERN} after the first /"}
    remarks = [
        f"{name} is deprecated in megatron-core 0.19 and is compared as {new}"
        for name, new in old.items()
        if name in options
    ]
    if _PATTERN not in options and _OLD_PATTERN in options:
        options[_PATTERN] = options.pop(_OLD_PATTERN)
    depths = "".join(options.get(_DEPTHS, ()))
    if _OLD_MTP in options and _PATTERN in options and depths.isdecimal():
        mtp = options.pop(_OLD_MTP)
        options[_PATTERN] = ("/".join((*options[_PATTERN], *mtp * int(depths))),)
    return remarks


def emulation(text: str) -> Emulation | None:
    """Return what a script or command emulates; None for nothing."""
    return parse_emulation(_last_value(EMULATE, text))


def adapters(text: str) -> str | None:
    """Return what NEMOTRON3_LORA is set to in a script, or before a command; None for no adapters."""
    value = _last_value(LORA, text)
    return None if value in ("", "0") else "" if value == "1" else value


def heads(text: str) -> str | None:
    """Return what NEMOTRON3_BOOST is set to in a script, or before a command; None: it trains all weights."""
    return _last_value(BOOST, text) or None


def _last_value(name: str, text: str) -> str:
    """The last value that a text gives a variable; "" for none, or one that is not known."""
    values = _SETTINGS[name].findall(text)
    value = values[-1].strip("\"'") if values else ""
    return value if is_known([value]) else ""


def layout_of(options: dict[str, tuple[str, ...]]) -> ParallelLayout | None:
    """Return the layout of a command line, with the smallest DP that its experts allow: no option gives DP.

    None if a size is not a positive number.
    """
    sizes: dict[str, int] = {}
    for field, name in _SIZES.items():
        value = (options.get(name) or ("",))[0]
        if not value and name not in options:
            continue
        if not (value.isascii() and value.isdecimal() and int(value)):
            return None
        sizes[field] = int(value)
    sizes.setdefault("etp", sizes.get("tp", 1) if "--num-experts" in options else 1)
    ranks, experts = sizes.get("tp", 1) * sizes.get("cp", 1), sizes["etp"] * sizes.get("ep", 1)
    dp = experts // math.gcd(ranks, experts)
    return ParallelLayout(**sizes, sp="--sequence-parallel" in options, dp=dp)
