"""Packed documents (THD) are the documents one by one, on one rank and on many, context-parallel ones too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.layers.context_parallel import document_borders, gathered_positions, zigzag
from megatron_nemotron3.layers.stack import MTPLayer, check_borders
from tests.parallel.case import Case
from tests.parallel.compare import check
from tests.parallel.layouts import CASES, PER_TOKEN
from tests.parallel.world import train

#: The load-balancing loss is of a sequence, and a pack is one sequence to Megatron (Megatron-LM #6108).
NO_AUX = ("--moe-aux-loss-coeff", "0")
DOCUMENTS = {
    # Unequal lengths; the number of counting tokens differs between documents.
    "nano": replace(CASES["nano"], documents=(8, 28, 12, 16), extra=(*NO_AUX, PER_TOKEN)),
    # Megatron weighs MTP by the counting tokens of a micro-batch: with the heads of documents masked the roll
    # loses none, so a pack weighs as its documents do.
    "super": replace(CASES["super"], documents=(8, 28, 12, 16), extra=NO_AUX, mask="heads"),
}
ROWS = [
    ("nano", ParallelLayout(), False),
    ("nano", ParallelLayout(cp=2), False),
    ("nano", ParallelLayout(tp=2), True),
    ("nano", ParallelLayout(cp=2, tp=2), True),
    ("super", ParallelLayout(), False),
    ("super", ParallelLayout(cp=2), False),
    ("super", ParallelLayout(tp=2), True),
    ("super", ParallelLayout(cp=2, tp=2), True),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=pytest.mark.full if full else (), id=f"{model}-{layout}")
        for model, layout, full in ROWS
    ],
)
def test_packed_equals_separate(model: str, layout: ParallelLayout) -> None:
    packed = DOCUMENTS[model]
    check(replace(packed, separate=True), packed.at(layout))


def test_packing_that_ignores_borders_is_noticed() -> None:
    """The same tokens as one sequence are another computation."""
    packed: Case = DOCUMENTS["nano"]
    with pytest.raises(AssertionError, match="gradients differ"):
        check(replace(packed, separate=True), replace(packed, documents=None))


class _Packed:
    """What `document_borders` reads of PackedSeqParams."""

    def __init__(self, borders: list[int], padded: list[int] | None = None, layout: str = "thd") -> None:
        self.qkv_format = layout
        self.cu_seqlens_q = torch.tensor(borders, dtype=torch.int32)
        self.cu_seqlens_q_padded = None if padded is None else torch.tensor(padded, dtype=torch.int32)


def test_zigzag() -> None:
    borders = document_borders(_Packed([0, 8, 12]), 12)  # type: ignore[arg-type]
    assert zigzag(borders, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag(borders, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert gathered_positions(borders, 2).sort().values.tolist() == list(range(12))


def test_borders() -> None:
    padded = _Packed([0, 7, 10], padded=[0, 8, 12])
    assert document_borders(padded, 16).tolist() == [0, 8, 12, 16]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="end at 12, but there are 8 tokens"):
        document_borders(padded, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="supports 'thd'"):
        document_borders(_Packed([0, 8], layout="sbhd"), 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"10 tokens is not divisible by 2\*CP=4: pad"):
        zigzag(torch.tensor([0, 10]), 2, 0)


def test_mtp_refuses_borders_that_only_padding_knows() -> None:
    check_borders(_Packed([0, 8, 12]))  # type: ignore[arg-type]
    check_borders(_Packed([0, 8, 12], padded=[0, 8, 12]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"end at \[0, 7, 10\] and are padded to \[0, 8, 12\].*#6205"):
        check_borders(_Packed([0, 7, 10], padded=[0, 8, 12]))  # type: ignore[arg-type]


def forget_borders(chunks: Any) -> None:
    """Make the first MTP depth see padded borders that are not the rolled ones."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MTPLayer):
                module.register_forward_pre_hook(_pad, with_kwargs=True)


def _pad(module: Any, args: Any, kwargs: Any) -> Any:
    packed = replace(kwargs["packed_seq_params"])
    packed.cu_seqlens_q_padded = packed.cu_seqlens_q + 1
    return args, {**kwargs, "packed_seq_params": packed}


def test_mtp_refuses_them_in_training() -> None:
    with pytest.raises(RuntimeError, match="ValueError: packed documents end at"):
        train(replace(DOCUMENTS["super"], sabotage=forget_borders, steps=1))
