"""What each of Megatron's options becomes in the proxy of a launch.

`launch/options.json` names a group for every option of the supported versions. An option that no version has
is taken for one that describes what is computed: it is kept, so Megatron accepts it or refuses it with its
own message.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_nemotron3.launch import parser


class Treatment(enum.Enum):
    """What becomes of an option."""

    KEPT = "kept as it is"
    SIZED = "kept in structure, made small"
    REPLACED = "replaced"
    DROPPED = "without effect on what is compared"
    UNTESTED = "not testable here"


@dataclass(frozen=True)
class OptionGroup:
    """Options with one treatment."""

    treatment: Treatment
    #: What they are, as a sentence names them.
    what: str
    #: What the proxy has instead, or why it can have nothing.
    instead: str = ""
    #: A way to compute the same, which one process does without.
    mechanism: bool = False
    #: Names of those that turn the others on; without one of them none has an effect.
    switches: tuple[str, ...] = ()


GROUPS: Mapping[str, OptionGroup] = {
    name: OptionGroup(
        Treatment[row["treatment"].upper()],
        row["what"],
        row.get("instead", ""),
        row.get("mechanism", False),
        tuple(f"--{switch}" for switch in row.get("switches", ())),
    )
    for name, row in parser.table()["treatments"].items()
}
MODEL_SIZES, SCHEDULE, RANDOM = GROUPS["model sizes"], GROUPS["schedule"], GROUPS["random numbers"]
#: For an option that no version has.
UNKNOWN = OptionGroup(Treatment.KEPT, "options that are not in the table")
#: For an option that nothing turns on.
OFF = OptionGroup(Treatment.DROPPED, "details of what is turned off")
#: Options that Megatron-FSDP needs, whatever the checkpoints are.
FSDP = {"--use-megatron-fsdp": ("--ckpt-format", "fsdp_dtensor")}
#: Options that Megatron sets to 0.1 where a command does not give them.
DROPOUT = ("--attention-dropout", "--hidden-dropout")
#: Option -> values that the proxy can have; others need a package or a GPU.
_ONLY: Mapping[str, tuple[tuple[str, ...], OptionGroup]] = {
    "--optimizer": (("adam", "sgd"), OptionGroup(Treatment.UNTESTED, "optimizers of other packages", "Adam")),
    "--moe-token-dispatcher-type": (("alltoall", "allgather"), GROUPS["dispatcher kernels"]),
}


def group(
    name: str, values: tuple[str, ...] = (), given: Mapping[str, tuple[str, ...]] | None = None
) -> OptionGroup:
    """Return the group of an option with its values; `UNKNOWN` if there is none, `OFF` without its switch."""
    found = parser.treatment(name)
    known = UNKNOWN if found is None else GROUPS[found]
    if name in _ONLY:
        allowed, other = _ONLY[name]
        known = known if not values or values[0] in allowed else other
    elif known is RANDOM and values and _is_off(values):
        return GROUPS["model"]  # so it is kept
    return OFF if given is not None and known.switches and not _is_on(known, given) else known


def _is_on(group: OptionGroup, given: Mapping[str, tuple[str, ...]]) -> bool:
    return any(
        name in group.switches
        and not _is_off(values)
        and (name not in _ONLY or values[0] not in _ONLY[name][0])
        for name, values in given.items()
    )


def _is_off(values: tuple[str, ...]) -> bool:
    try:
        return bool(values) and float(values[0]) == 0
    except ValueError:
        return values[0] == "none"
