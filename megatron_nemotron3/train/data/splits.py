"""Which documents Megatron's --split assigns to training, validation and test."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

#: Tried in this order by `default_split`.
SPLITS = ("98,2,0", "95,5,0", "90,10,0", "80,20,0", "50,50,0")
NAMES = ("training", "validation", "test")

# The validation split of a default --split holds at least this share of the text.
_ENOUGH = 0.01


def split_documents(split: str, documents: int) -> list[range | None]:
    """Documents of (training, validation, test) under `--split split`; None where its weight is 0.

    GPTDataset cuts by document, not by token, in file order: split i is [round(a_i n), round(a_(i+1) n))
    of the n documents, a_i the running sum of the normalized weights (Megatron's
    BlendedMegatronDatasetBuilder._build_megatron_dataset_splits).

    Raises ValueError if a split with a weight gets no document: Megatron would then loop forever over epochs
    of 0 tokens.
    """
    ranges: list[range | None] = []
    for name, bounds in zip(NAMES, _bounds(split), strict=True):
        if bounds is None:
            ranges.append(None)
            continue
        part = range(*(round(bound * documents) for bound in bounds))
        if not part:
            raise ValueError(
                f"--split {split} gives {name} none of the {documents} documents, and Megatron would hang: "
                "use more documents or a larger share"
            )
        ranges.append(part)
    return ranges


def _bounds(split: str) -> list[tuple[float, float] | None]:
    """Shares at which each split begins and ends, read as Megatron reads them; None for weight 0."""
    try:
        weights = [float(weight) for weight in re.findall(r"[.0-9]+", split)]
    except ValueError:
        weights = []
    if not (0 < len(weights) <= len(NAMES) and sum(weights) > 0):
        raise ValueError(f"--split {split}: give up to three weights, for example 98,2,0")
    weights += [0.0] * (len(NAMES) - len(weights))
    total = 0.0
    for weight in weights:  # not by sum, which rounds less than Megatron's numpy
        total += weight
    ends = list(itertools.accumulate((weight / total for weight in weights), initial=0.0))
    return [(start, end) if end > start else None for start, end in itertools.pairwise(ends)]


def default_split(lengths: Sequence[int]) -> str:
    """Return the first of SPLITS that holds out at least 1% of the text; `lengths` of documents, in any unit.

    Without such a split, the first that holds out any document. Raises ValueError if there is none.
    """
    possible = []
    for split in SPLITS:
        try:
            _, held_out, _ = split_documents(split, len(lengths))
        except ValueError:
            continue
        assert held_out is not None
        possible.append(split)
        if sum(lengths[i] for i in held_out) >= _ENOUGH * sum(lengths):
            return split
    if possible:
        return possible[0]
    raise ValueError(
        f"{len(lengths)} document(s) cannot be split into training and validation: collect at least 2 "
        "(a single text file is cut into documents of about 8 kB)"
    )
