"""`--isolate-documents`: Megatron's options for it, and what it does not go with. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_nemotron3.common.parser import option_value, option_values
from megatron_nemotron3.train.data.indexed import require_ended

ISOLATE = "--isolate-documents"
_MASKING = "--dataloader-inter-document-masking"
#: None attends to another, and none is the target of another.
ISOLATION_OPTIONS = (_MASKING, "--eod-mask-loss", "--calculate-per-token-loss")


def micro_batch_problem(size: object) -> str:
    """Why documents are not isolated in a larger micro-batch, with the cure."""
    return (
        f"{ISOLATE} with --micro-batch-size {size}: documents are packed into one row, and the "
        "load-balancing loss is one of a row: use 1, and a larger --seq-length"
    )


def require_ends(data_path: Sequence[str]) -> None:
    """Raise ValueError at a data set without ends of documents; print a warning where they are doubtful."""
    for prefix in data_path:  # or the weight of one, or a place in an object store
        if Path(f"{prefix}.idx").is_file() and (warning := require_ended(prefix)):
            print(f"warning: {warning}", file=sys.stderr)


def require_possible(arguments: Sequence[str], *, distilled: bool) -> None:
    """Raise ValueError at arguments of a script that do not go with isolated documents."""
    if (size := option_value(arguments, "--micro-batch-size")) not in (None, "1"):
        raise ValueError(micro_batch_problem(size))
    if "--sft" in arguments:
        raise ValueError(f"{ISOLATE} with --sft: none of its conversations sees another anyway: drop it")
    if distilled:
        raise ValueError(f"{ISOLATE} and --nemotron3-teacher do not go together: drop one")
    require_ends(option_values(arguments, "--data-path") or ())


def taken(arguments: Sequence[str]) -> list[str]:
    """Arguments of a script with Megatron's options in place of `ISOLATE`."""
    others = [word for word in arguments if word != ISOLATE]
    return [*others, *(word for word in ISOLATION_OPTIONS if word not in others)]


def cuts_whole_rows(arguments: Sequence[str]) -> bool:
    """Whether the script cuts rows over context-parallel ranks regardless of documents."""
    cp = option_value(arguments, "--context-parallel-size") or "1"
    return cp != "1" and _MASKING in arguments and "--sft" not in arguments
