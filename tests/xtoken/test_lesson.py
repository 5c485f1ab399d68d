"""The teacher's part of a training step: its batch, and the loss of each of the student's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.certify.ranks import run_distributed
from megatron_nemotron3.xtoken.align import Aligner
from megatron_nemotron3.xtoken.lesson import AcrossTokenizers
from megatron_nemotron3.xtoken.loss import span_losses
from megatron_nemotron3.xtoken.projection import Projection
from megatron_nemotron3.xtoken.tokens import Vocabulary
from tests.xtoken.tokenizers_of import TEXT, train

WIDTH = 512


class _Table:
    """A teacher whose hidden states are its tokens, and whose logits a table has; in parts under TP."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        table = 3 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4))
        self._part = table.chunk(size, -1)[rank]
        self.given: list[tuple[int, int]] = []

    def forward(self, chunk: Any, given: dict[str, Any], tokens: int, rows: int) -> Tensor:
        assert given["input_ids"].shape == given["position_ids"].shape == (rows, tokens)
        self.given.append((tokens, rows))
        return given["input_ids"].T

    def logits(self, hidden: Tensor) -> Tensor:
        return self._part[hidden]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("lesson")
    student = train(folder / "s", 380, digits=3)
    teacher = train(folder / "t", 340, digits=1, special=("<eos>",))
    Projection.build(Vocabulary(student), Vocabulary(teacher)).save(folder / "p")
    return student, teacher, folder / "p"


def _step(folders: tuple[Path, Path, Path]) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Tokens' losses and the gradient of their sum on this rank."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank, group = (torch.distributed.get_rank(), torch.distributed.group.WORLD) if size > 1 else (0, None)
    student, teacher, projection = folders
    ids = [Vocabulary(student).encode([text.encode()])[0][:16] for text in TEXT[:2]]
    tokens = torch.tensor(ids)
    table = _Table(rank, size)
    lesson = AcrossTokenizers(
        table,
        None,
        projection=projection,
        student=student,
        tokenizer=teacher,
        kind="p-kl",
        temperature=2.0,
        group=group,
    )
    lesson.prepare({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}, 15, 2)
    logits = torch.randn(15, 2, WIDTH, generator=torch.Generator().manual_seed(5))
    mine = logits.chunk(size, -1)[rank].clone().requires_grad_()
    found = lesson.divergence(mine)
    found.sum().backward()
    assert mine.grad is not None
    return found.detach(), mine.grad, table.given


def test_a_span_is_spread_over_its_tokens(folders: tuple[Path, Path, Path]) -> None:
    """What the tokens of a span add is its loss; other tokens add nothing."""
    found, _, given = _step(folders)
    ours, theirs = Vocabulary(folders[0]), Vocabulary(folders[1])
    ids = [ours.encode([text.encode()])[0][:16] for text in TEXT[:2]]
    batch, alignment = Aligner(ours, theirs).batch(ids, step=64)
    assert given == [(64, 2)] and batch.shape == (2, 64)
    logits = torch.randn(15, 2, WIDTH, generator=torch.Generator().manual_seed(5))
    expected = span_losses(
        logits.transpose(0, 1),
        _Table().logits(batch),
        alignment,
        Projection.load(folders[2]),
        temperature=2.0,
    )
    inside = alignment.student >= 0
    sums = torch.zeros(alignment.spans).index_add(0, alignment.student[inside], found.T[inside])
    torch.testing.assert_close(sums, expected)
    assert not found.T[~inside].any()


def test_two_ranks(folders: tuple[Path, Path, Path]) -> None:
    """Both have all losses; the teacher's rows divide by the ranks, for sequence parallelism."""
    found, gradient, _ = _step(folders)
    ranks = run_distributed(_step, 2, folders)
    for losses, _, given in ranks:
        torch.testing.assert_close(losses, found)
        assert given == [(128, 2)]
    torch.testing.assert_close(torch.cat([part for _, part, _ in ranks], -1), gradient)
