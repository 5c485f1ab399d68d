"""What a student learns from: the logits of a teacher in the same run, or stored ones."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_nemotron3.distill.divergence import divergence
from megatron_nemotron3.distill.settings import Distillation
from megatron_nemotron3.distill.stored import Reader
from megatron_nemotron3.distill.teacher import Teacher
from megatron_nemotron3.distill.topk import topk_divergence
from megatron_nemotron3.layers.context_parallel import cu_seqlens, zigzag


class Lesson(Protocol):
    """What a chunk of the student learns from, one micro-batch after the other."""

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        """Before the student's forward with these arguments, on each stage; s / cp and b."""

    def divergence(self, logits: Tensor) -> Tensor:
        """Logits [s / cp, b, v / tp] of the student -> [s / cp, b], nats; on the last stage."""


class FromTeacher:
    """A chunk of a teacher in the same run."""

    def __init__(self, teacher: Teacher, student: HybridModel, how: Distillation) -> None:
        self._teacher, self._how, self._group = teacher, how, student.pg_collection.tp
        self._chunk = teacher.add(student)
        self._hidden: Tensor | None = None
        # Rows of the embedding that only one of the two has are padding.
        self._vocabulary = min(student.vocab_size, teacher.found.vocabulary.entries or teacher.rows)

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        """Run the teacher's chunk."""
        self._hidden = self._teacher.forward(self._chunk, given, tokens, rows)

    def divergence(self, logits: Tensor) -> Tensor:
        """As of `Lesson`."""
        assert self._hidden is not None
        target, self._hidden = self._teacher.logits(self._hidden), None
        how = self._how
        return divergence(logits, target, how.kind, how.temperature, self._group, vocabulary=self._vocabulary)


class FromStored:
    """Stored log-probabilities, which ranks of the last stage look up by their labels."""

    def __init__(self, source: Reader, student: HybridModel, how: Distillation) -> None:
        self._source, self._how, self._student = source, how, student
        self._target: tuple[Tensor, Tensor] | None = None

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        """Look up the rows of a micro-batch."""
        if not self._student.post_process:
            return
        labels: Tensor = given["labels"]
        cp = self._student.pg_collection.cp
        borders, ends = borders_of(given.get("packed_seq_params"), labels.shape[1] * cp.size())
        here = zigzag(ends, cp.size(), cp.rank()) if cp.size() > 1 else torch.arange(labels.shape[1])
        found = [self._source.row(row, borders) for row in gathered(labels, ends, cp).cpu().numpy()]
        ids, log_p = (torch.stack([torch.from_numpy(pair[i])[here] for pair in found], 1) for i in range(2))
        self._target = (
            ids.to(labels.device, torch.long, non_blocking=True),
            log_p.to(labels.device, non_blocking=True),
        )

    def divergence(self, logits: Tensor) -> Tensor:
        """As of `Lesson`."""
        assert self._target is not None
        (ids, log_p), self._target = self._target, None
        how, group = self._how, self._student.pg_collection.tp
        return topk_divergence(
            logits, ids, log_p, how.kind, how.temperature, group, vocabulary=self._student.vocab_size
        )


def borders_of(packed: Any, length: int) -> tuple[Tensor | None, list[int]]:
    """Borders of the documents of a row of `length` tokens.

    Returns:
        Those of the pack on the host, or None without one; and where parts of the row begin and end, the
        padding behind the last document among them.
    """
    borders = None if packed is None else cu_seqlens(packed).cpu()
    ends = [0] if borders is None else borders.tolist()
    return borders, ends + ([length] if ends[-1] < length else [])


def gathered(mine: Tensor, ends: list[int], cp: Any) -> Tensor:
    """Rows [b, s, …] of which each context rank has its part [b, s / cp, …]."""
    if cp.size() == 1:
        return mine
    parts = [torch.empty_like(mine) for _ in range(cp.size())]
    dist.all_gather(parts, mine.contiguous(), group=cp)
    whole = torch.cat(parts, 1)
    for rank, part in enumerate(parts):
        whole[:, zigzag(ends, cp.size(), rank, mine.device)] = part
    return whole
