"""Read the Megatron options out of the text of an existing launch.

The text is one command (`torchrun … pretrain_hybrid.py --a 1 …`), options alone, a shell script (`script`),
or YAML (`yaml_launch`). Values of variables that are not set keep their `$` (`is_known`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_nemotron3.common.limits import limited
from megatron_nemotron3.common.switches import BOOST, EMULATE, LORA
from megatron_nemotron3.launch import yaml_launch
from megatron_nemotron3.launch.flag import Flag, is_known
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.launch.script import LaunchSource, Script, follow
from megatron_nemotron3.models.config import MOST
from megatron_nemotron3.precision.settings import OPTION, Emulation, parse_emulation

_SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}
_PATTERN, _DEPTHS = "--hybrid-layer-pattern", "--mtp-num-layers"
_MTP = "mtp_num_layers"
_OLD_PATTERN, _OLD_MTP = "--hybrid-override-pattern", "--mtp-hybrid-override-pattern"

#: Twice as many as Megatron has.
MOST_OPTIONS = 2_000


@dataclass(frozen=True)
class LaunchText:
    """The options and the size of a launch, read from its text."""

    #: Its options, each once.
    flags: list[Flag]
    #: Remarks on how it was read.
    notes: list[str]
    #: Ranks that it starts, by the options of torchrun or Slurm; None if unknown.
    world_size: int | None = None
    #: Variables of this package that its processes get.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def emulate(self) -> Emulation | None:
        """What it emulates, by the option of our launcher or by its variable; None for nothing."""
        options = {flag.name: flag.values for flag in self.flags}
        words = options.get(OPTION) or (self._variable(EMULATE),)
        return parse_emulation(words[0]) if is_known(words) else None

    @property
    def adapters(self) -> str | None:
        """What `LoRASettings.parse` reads; None for no adapters."""
        value = self._variable(LORA)
        return None if value in ("", "0") else "" if value == "1" else value

    @property
    def heads(self) -> str | None:
        """What `Boost.parse` reads; None: it trains all weights."""
        return self._variable(BOOST) or None

    def _variable(self, name: str) -> str:
        value = self.environment.get(name, "")
        return value if is_known([value]) else ""


def read_launch(source: str | LaunchSource) -> LaunchText:
    """Read a launch, or its text. Of an option that it gives more than once the last counts, as for argparse.

    Raises:
        ValueError: the text has no option or takes more than its limits, or as `script.follow`.
    """
    source = LaunchSource(source) if isinstance(source, str) else source
    return limited(lambda: _read_launch(source), "the text of the launch")


def _read_launch(source: LaunchSource) -> LaunchText:
    if yaml_launch.is_yaml(source.text):
        if source.variables:
            raise ValueError("--set sets variables of a shell script, and the text is YAML")
        followed = Script(*yaml_launch.read(source.text))
    else:
        followed = follow(source)
    found, notes = followed.options, followed.notes
    if len(found) > MOST_OPTIONS:
        raise ValueError(f"{len(found):,} different options: Megatron has fewer than {MOST_OPTIONS:,}")
    if not found:
        raise ValueError(
            "no Megatron option in the text: paste the command as it was run, pretrain_hybrid.py --…"
        )
    notes = [*_rename_patterns(found), *notes]
    flags = [Flag(name, values) for name, values in found.items()]
    return LaunchText(flags, notes, followed.world_size, followed.environment)


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
        if len(depths) > 9 or int(depths) > MOST[_MTP]:
            raise ValueError(f"{_DEPTHS} {depths[:40]}: a model has at most {MOST[_MTP]}")
        mtp = options.pop(_OLD_MTP)
        options[_PATTERN] = ("/".join((*options[_PATTERN], *mtp * int(depths))),)
    return remarks


def layout_of(options: dict[str, tuple[str, ...]]) -> ParallelLayout | None:
    """Return the layout of a command line, with the smallest DP that its experts allow: no option gives DP.

    None if a size is not a positive number.
    """
    sizes: dict[str, int] = {}
    for size, name in _SIZES.items():
        value = (options.get(name) or ("",))[0]
        if not value and name not in options:
            continue
        if not (value.isascii() and value.isdecimal() and int(value)):
            return None
        sizes[size] = int(value)
    sizes.setdefault("etp", sizes.get("tp", 1) if "--num-experts" in options else 1)
    ranks, experts = sizes.get("tp", 1) * sizes.get("cp", 1), sizes["etp"] * sizes.get("ep", 1)
    dp = experts // math.gcd(ranks, experts)
    return ParallelLayout(**sizes, sp="--sequence-parallel" in options, dp=dp)
