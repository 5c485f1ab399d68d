"""`--isolate-documents`: Megatron's options for it, and what it does not go with. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_nemotron3.common.parser import option_value
from megatron_nemotron3.launch import data_sets
from megatron_nemotron3.launch.flag import values_by_name
from megatron_nemotron3.train.data.indexed import require_ended

ISOLATE = "--isolate-documents"
_MASKING = "--dataloader-inter-document-masking"
#: None attends to another, and none is the target of another.
ISOLATION_OPTIONS = (_MASKING, "--eod-mask-loss", "--calculate-per-token-loss")


def is_first_of_node() -> bool:
    """Whether this rank looks at data for all ranks of its node: they may lie on its disk."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def micro_batch_problem(size: object) -> str:
    """Why documents are not isolated in a larger micro-batch, with the cure."""
    return (
        f"{ISOLATE} with --micro-batch-size {size}: documents are packed into one row, and the "
        "load-balancing loss is one of a row: use 1, and a larger --seq-length"
    )


def require_ends(words: Sequence[str]) -> None:
    """Raise ValueError at a data set without ends of documents; print a warning where they are doubtful."""
    try:
        blends = data_sets.blends(values_by_name(words))
    except OSError as problem:
        raise ValueError(f"{problem.filename}: {problem.strerror}") from None
    for prefix in (prefix for blend in blends for prefix in blend.prefixes):
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
    if is_first_of_node():
        require_ends(arguments)


def taken(arguments: Sequence[str]) -> list[str]:
    """Arguments of a script with Megatron's options in place of `ISOLATE`."""
    others = [word for word in arguments if word != ISOLATE]
    return [*others, *(word for word in ISOLATION_OPTIONS if word not in others)]


def cuts_whole_rows(arguments: Sequence[str]) -> bool:
    """Whether the script cuts rows over context-parallel ranks regardless of documents."""
    cp = option_value(arguments, "--context-parallel-size") or "1"
    return cp != "1" and _MASKING in arguments and "--sft" not in arguments
