"""Which documents Megatron's --split assigns to training, validation and test."""

from __future__ import annotations

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
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    ranges: list[range | None] = []
    for name, bounds in zip(
        NAMES, convert_split_vector_to_split_matrix(parse_and_normalize_split(split)), strict=True
    ):
        if bounds is None:
            ranges.append(None)
            continue
        part = range(*(round(bound * float(documents)) for bound in bounds))
        if not part:
            raise ValueError(
                f"--split {split} gives {name} none of the {documents} documents, and Megatron would hang: "
                "use more documents or a larger share"
            )
        ranges.append(part)
    return ranges


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
