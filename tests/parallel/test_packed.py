"""Packed documents (THD) are the documents one by one, on one rank and on many, context-parallel ones too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.layers.context_parallel import (
    TokenPlaces,
    document_borders,
    gathered_positions,
    zigzag,
)
from megatron_nemotron3.layers.mtp import MTPLayer, refuse_padding
from megatron_nemotron3.proof.certify.compare import reference, weights
from megatron_nemotron3.proof.certify.world import train
from tests.parallel.case import Case
from tests.parallel.compare import against, check
from tests.parallel.layouts import CASES, PER_TOKEN

#: The load-balancing loss is of a sequence, and a pack is one sequence to Megatron (Megatron-LM #6108).
NO_AUX = ("--moe-aux-loss-coeff", "0")
DOCUMENTS = {
    # Unequal lengths; the number of counting tokens differs between documents.
    "nano": replace(CASES["nano"], documents=(8, 28, 12, 16), extra=(*NO_AUX, PER_TOKEN), steps=1),
    # Megatron weighs MTP by the counting tokens of a micro-batch: with the heads of documents masked the roll
    # loses none, so a pack weighs as its documents do.
    "super": replace(CASES["super"], documents=(8, 28, 12, 16), extra=NO_AUX, mask="heads", steps=1),
}
ROWS = [
    ("nano", ParallelLayout(), True),
    ("nano", ParallelLayout(cp=2), True),
    ("nano", ParallelLayout(tp=2), True),
    ("nano", ParallelLayout(cp=2, tp=2), True),
    ("super", ParallelLayout(), True),
    ("super", ParallelLayout(cp=2), True),
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


@pytest.mark.full
def test_packing_that_ignores_borders_is_noticed() -> None:
    """The same tokens as one sequence are another computation."""
    packed: Case = DOCUMENTS["super"]
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


#: One document without padding, one whose padding begins at the edge of a CP chunk, one whose padding begins
#: inside one, one that is all padding, one shorter than MTP is deep, and padding behind the last.
PADDED = replace(
    CASES["super"],
    documents=(8, 12, 7, 0, 1),
    padded=(8, 16, 12, 8, 8),
    mask="random heads",
    model_mask="padding counts",
    extra=NO_AUX,
    steps=1,
)
PADDED_LAYOUTS = [
    (ParallelLayout(), True),
    (ParallelLayout(cp=2), False),
    (ParallelLayout(tp=2), True),
    (ParallelLayout(cp=2, tp=2), True),
    (ParallelLayout(tp=2, pp=2), True),
    (ParallelLayout(cp=2, pp=2, vpp=2), True),
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.full if full else (), id=str(layout))
        for layout, full in PADDED_LAYOUTS
    ],
)
def test_padded_equals_separate(layout: ParallelLayout) -> None:
    check(replace(PADDED, separate=True), PADDED.at(layout))


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), pytest.param(ParallelLayout(cp=2), marks=pytest.mark.full)], ids=str
)
def test_padding_does_not_count_without_a_mask(layout: ParallelLayout) -> None:
    """Megatron-Bridge gives the model no mask: all tokens but the padding count, as in a pack without."""
    padded = replace(PADDED, mask="none", model_mask="absent")
    found = train(padded.at(layout), weights(padded))
    dense = replace(padded, padded=None, seq_length=sum(PADDED.documents or ()))
    base = reference(dense)
    against(dense, base, found)


def test_a_model_that_is_not_called_as_a_module_is_refused() -> None:
    refuse_padding(_Packed([0, 8, 12]))  # type: ignore[arg-type]
    both = _Packed([0, 8, 12])
    both.cu_seqlens_q_padded = both.cu_seqlens_q
    refuse_padding(both)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"ValueError: packed documents have cu_seqlens_q_padded.*#6205"):
        train(replace(PADDED, sabotage=forget_hooks, steps=1))


def forget_hooks(chunks: Any) -> None:
    """Remove the hooks of the model, as code that calls `model.forward` would."""
    for chunk in chunks:
        chunk._forward_pre_hooks.clear()
        assert any(isinstance(module, MTPLayer) for module in chunk.modules())


def test_borders_of_other_documents_are_refused() -> None:
    packed = _Packed([0, 7], padded=[0, 8, 12])
    with pytest.raises(ValueError, match="of 1 documents, cu_seqlens_q_padded of 2"):
        TokenPlaces.of(packed, 12, 1, 0, torch.device("cpu"))  # type: ignore[arg-type]
