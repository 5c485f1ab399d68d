"""The part of a teacher with another tokenizer in a training step: its batch, and the loss of each token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_nemotron3.layers.context_parallel import zigzag
from megatron_nemotron3.post_training.distill.across import AcrossTokenizers
from megatron_nemotron3.post_training.xtoken.align import Aligner
from megatron_nemotron3.post_training.xtoken.loss import SpanLoss, span_losses
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.train.teacher.projection import Projection
from megatron_nemotron3.train.teacher.settings import Distillation
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary
from tests.post_training.xtoken.tokenizers_of import TEXT, train

Folders = tuple[Path, Path, Path]
WIDTH = 512
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
#: Documents of a packed row, what they are padded to, and the row. The second has no label at its end.
REAL, PADDED, ROW = (13, 8, 17), (16, 8, 20), 64


class _Table:
    """A teacher's chunk: its hidden states are its tokens, a table has its logits; in parts under TP."""

    def __init__(self, rank: int = 0, size: int = 1, cp: int = 1) -> None:
        self._multiple = 64 * size * cp
        table = 3 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4))
        self._part = table.chunk(size, -1)[rank]
        self.given: list[tuple[int, int]] = []

    def from_first_stage(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        return make()

    def length(self, longest: int) -> int:
        return -(-longest // self._multiple) * self._multiple

    def forward(self, arguments: dict[str, Any], tokens: int, rows: int) -> Tensor:
        ids: Tensor = arguments["input_ids"]
        assert ids.shape == (rows, tokens)
        self.given.append((tokens, rows))
        return ids.T

    def logits(self, hidden: Tensor) -> Tensor:
        return self._part[hidden]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("signal")
    student = train(folder / "s", 380, digits=3)
    teacher = train(folder / "t", 340, digits=1, special=("<eos>",))
    Projection.build(ByteVocabulary(student), ByteVocabulary(teacher)).save(folder / "p")
    return student, teacher, folder / "p"


def _texts(folders: Folders) -> list[list[int]]:
    student = ByteVocabulary(folders[0])
    return [student.encode([text.encode()])[0] for text in TEXT[:3]]


def _rows(folders: Folders) -> dict[str, Tensor]:
    ids = torch.tensor([text[:17] for text in _texts(folders)[:2]])
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def _pack(folders: Folders) -> dict[str, Any]:
    tensors = {name: torch.zeros(1, ROW, dtype=torch.int64) for name in ("input_ids", "labels", "loss_mask")}
    padding, at = torch.ones(1, ROW, dtype=torch.bool), 0
    for i, (text, n, padded) in enumerate(zip(_texts(folders), REAL, PADDED)):
        labels = n - (i == 1)
        tensors["input_ids"][0, at : at + n] = torch.tensor(text[:n])
        tensors["labels"][0, at : at + labels] = torch.tensor(text[1 : labels + 1])
        tensors["loss_mask"][0, at : at + labels] = 1
        padding[0, at : at + n] = False
        at += padded
    return {**tensors, "padding_mask": padding}


def _step(folders: Folders, packed: bool, tp: int = 1, cp: int = 1) -> tuple[Tensor, Tensor, list[Any]]:
    """Tokens' losses [s / cp, b] and the gradient of their sum on this rank."""
    groups = SimpleNamespace(tp=ALONE, cp=ALONE)
    if tp * cp > 1:
        ranks = torch.arange(tp * cp).view(cp, tp)
        groups.tp = torch.distributed.new_subgroups_by_enumeration(ranks.tolist())[0]
        groups.cp = torch.distributed.new_subgroups_by_enumeration(ranks.T.tolist())[0]
    whole = _pack(folders) if packed else _rows(folders)
    length = whole["labels"].shape[1]
    borders = torch.tensor([0, *PADDED, length - sum(PADDED)] if packed else [0, length]).cumsum(0).int()
    here = zigzag(borders, cp, groups.cp.rank()) if cp > 1 else torch.arange(length)
    given = {name: tensor[:, here] for name, tensor in whole.items()}
    if packed:
        given["packed_seq_params"] = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders)
    table = _Table(groups.tp.rank(), tp, cp)
    how = Distillation("teacher", "p-kl", 2.0, projection=str(folders[2]))
    signal = AcrossTokenizers(table, groups, how, folders[0], folders[1])  # type: ignore[arg-type]
    rows = len(given["labels"])
    signal.prepare(given, len(here), rows)
    logits = torch.randn(length, rows, WIDTH, generator=torch.Generator().manual_seed(5))[here]
    mine = logits.chunk(tp, -1)[groups.tp.rank()].clone().requires_grad_()
    found = signal.divergence(mine)
    found.sum().backward()
    assert mine.grad is not None
    return found.detach(), mine.grad, table.given


def test_a_span_is_spread_over_its_tokens(folders: Folders) -> None:
    """What the tokens of a span add is its loss; other tokens add nothing."""
    found, _, given = _step(folders, packed=False)
    ids = [text[:16] for text in _texts(folders)[:2]]
    batch, alignment = Aligner(ByteVocabulary(folders[0]), ByteVocabulary(folders[1])).batch(ids)
    assert given == [(64, 2)] and batch.shape[1] <= 64
    logits = torch.randn(16, 2, WIDTH, generator=torch.Generator().manual_seed(5)).transpose(0, 1)[:, :-1]
    assert not found[-1].any()  # what follows the last token, the first stage does not know
    found = found[:-1]
    target = _Table().logits(batch)
    expected = span_losses(logits, target, alignment, Projection.load(folders[2]), SpanLoss(temperature=2.0))
    inside = alignment.student >= 0
    sums = torch.zeros(alignment.spans).index_add(0, alignment.student[inside], found.T[inside])
    torch.testing.assert_close(sums, expected)
    assert not found.T[~inside].any()


def test_documents_of_a_pack_are_texts_of_their_own(folders: Folders) -> None:
    """As each alone; padding, and a last token whose next one is not in the text, add nothing."""
    found, _, given = _step(folders, packed=True)
    assert given == [(64, 1)]
    whole = _pack(folders)
    aligner = Aligner(ByteVocabulary(folders[0]), ByteVocabulary(folders[1]))
    logits = torch.randn(ROW, 1, WIDTH, generator=torch.Generator().manual_seed(5))
    expected = torch.zeros(ROW)
    for i, (start, n) in enumerate(zip((0, 16, 24), REAL)):
        ids = whole["input_ids"][0, start : start + n].tolist()
        ids += whole["labels"][0, start + n - 1 : start + n].tolist() * (i != 1)
        batch, alignment = aligner.batch([ids])
        ours = logits[start : start + len(ids) - 1].transpose(0, 1)
        losses = span_losses(
            ours, _Table().logits(batch), alignment, Projection.load(folders[2]), SpanLoss(temperature=2.0)
        )
        for place, span in enumerate(alignment.student[0].tolist()):
            if span >= 0:
                expected[start + place] = losses[span] / alignment.student.eq(span).sum()
    assert (expected > 0).sum() > 20
    torch.testing.assert_close(found[:, 0], expected)


@pytest.mark.parametrize(
    ("packed", "tp", "cp"), [(True, 2, 2), pytest.param(False, 2, 2, marks=pytest.mark.full)]
)
def test_on_ranks(folders: Folders, packed: bool, tp: int, cp: int) -> None:
    """Losses and gradients of one process; the teacher's rows divide by 2 CP, and by TP for its sequence."""
    found, gradient, given = _step(folders, packed)
    ranks = run_distributed(_step, tp * cp, folders, packed, tp, cp)
    length = found.shape[0]
    borders = [0, *PADDED, length - sum(PADDED)] if packed else [0, length]
    ends = torch.tensor(borders).cumsum(0)
    for rank, (losses, mine, (seen,)) in enumerate(ranks):
        here = zigzag(ends, cp, rank // tp) if cp > 1 else torch.arange(length)
        torch.testing.assert_close(losses, found[here])
        torch.testing.assert_close(mine, gradient[here].chunk(tp, -1)[rank % tp], rtol=1e-4, atol=1e-6)
        assert seen[0] * cp % (64 * tp * cp) == 0 and seen[0] * cp >= given[0][0]
