"""What each of Megatron's options becomes in the twin of a launch. Standard library only.

An option that stands in no row is taken for one that describes what is computed: it is kept, so Megatron
accepts it or refuses it with its own message.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache

from megatron_nemotron3.certify.option_rows import (
    LAYOUT_SIZES,
    MEANING,
    MODEL_SIZES,
    SCHEDULE,
    TABLE,
    UNTESTED,
    Fate,
    Row,
)

__all__ = (
    "DROPOUT",
    "FSDP",
    "LAYOUT_SIZES",
    "MODEL_SIZES",
    "OFF",
    "SCHEDULE",
    "TABLE",
    "UNKNOWN",
    "Fate",
    "Row",
    "row",
    "rows",
)

#: For an option that no row has.
UNKNOWN = Row(Fate.KEPT, "options that are not in the table", "", ())
#: For an option that nothing turns on.
OFF = Row(Fate.DROPPED, "details of what is turned off", "", ())
#: Options that Megatron-FSDP needs, whatever the checkpoints are.
FSDP = {"--use-megatron-fsdp": ("--ckpt-format", "fsdp_dtensor")}
#: Options that Megatron sets to 0.1 where a command does not give them.
DROPOUT = ("--attention-dropout", "--hidden-dropout")
#: Option -> values that the twin can have; others need a package or a GPU.
_ONLY: Mapping[str, tuple[tuple[str, ...], Row]] = {
    "--optimizer": (
        ("adam", "sgd"),
        Row(Fate.UNTESTED, "optimizers of other packages", "Adam", ()),
    ),
    "--moe-token-dispatcher-type": (
        ("alltoall", "allgather"),
        next(row for row in UNTESTED if "moe-flex-*" in row.names),
    ),
}


@cache
def rows(name: str) -> tuple[Row, ...]:
    """Return the rows of an option ("--bf16"). An exact name counts more than a pattern."""
    word = name.removeprefix("--")
    exact = tuple(row for row in TABLE if word in row.names)
    return exact or tuple(
        row for row in TABLE if any("*" in known and fnmatchcase(word, known) for known in row.names)
    )


def row(name: str, values: tuple[str, ...] = (), given: Mapping[str, tuple[str, ...]] | None = None) -> Row:
    """Return the row of an option with its values; `UNKNOWN` if there is none, `OFF` without its switch.

    Args:
        given: all options of the command.
    """
    found = rows(name)
    known = found[0] if found else UNKNOWN
    if name in _ONLY:
        allowed, other = _ONLY[name]
        known = known if not values or values[0] in allowed else other
    elif known.what.startswith("random numbers") and values and _is_off(values):
        return MEANING  # so it is kept
    return OFF if given is not None and known.switches and not _is_on(known, given) else known


def _is_on(row: Row, given: Mapping[str, tuple[str, ...]]) -> bool:
    return any(
        fnmatchcase(name, f"--{switch}")
        and not _is_off(values)
        and (name not in _ONLY or values[0] not in _ONLY[name][0])
        for name, values in given.items()
        for switch in row.switches
    )


def _is_off(values: tuple[str, ...]) -> bool:
    try:
        return bool(values) and float(values[0]) == 0
    except ValueError:
        return values[0] == "none"
