"""What a student learns from: the logits of a teacher in the same run, or stored ones."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_nemotron3.layers.context_parallel import zigzag
from megatron_nemotron3.post_training.distill.divergences import divergence
from megatron_nemotron3.post_training.distill.rows import borders_of, gathered
from megatron_nemotron3.post_training.distill.stored import Reader
from megatron_nemotron3.post_training.distill.teacher import Teacher
from megatron_nemotron3.post_training.distill.topk import topk_divergence
from megatron_nemotron3.train.teacher.settings import Distillation


class TeacherSignal(Protocol):
    """What a chunk of the student learns from, one micro-batch after the other."""

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        """Before the student's forward with these arguments, on each stage; s / cp and b."""

    def divergence(self, logits: Tensor) -> Tensor:
        """Logits [s / cp, b, v / tp] of the student -> [s / cp, b], nats; on the last stage."""


class OnlineSignal:
    """A chunk of a teacher in the same run."""

    def __init__(self, teacher: Teacher, student: HybridModel, how: Distillation) -> None:
        self._how, self._group = how, student.pg_collection.tp
        self._chunk = teacher.add(student)
        self._hidden: Tensor | None = None
        # Rows of the embedding that only one of the two has are padding.
        self._vocabulary = min(student.vocab_size, teacher.found.vocabulary.entries or teacher.rows)

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        self._hidden = self._chunk.forward(given, tokens, rows)

    def divergence(self, logits: Tensor) -> Tensor:
        assert self._hidden is not None
        target, self._hidden = self._chunk.logits(self._hidden), None
        how = self._how
        return divergence(logits, target, how.kind, how.temperature, self._group, vocabulary=self._vocabulary)


class StoredSignal:
    """Stored log-probabilities, which ranks of the last stage look up by their labels."""

    def __init__(self, source: Reader, student: HybridModel, how: Distillation) -> None:
        self._source, self._how, self._student = source, how, student
        self._target: tuple[Tensor, Tensor] | None = None

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
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
        assert self._target is not None
        target, self._target = self._target, None
        how, group, size = self._how, self._student.pg_collection.tp, self._student.vocab_size
        return topk_divergence(logits, target, how.kind, how.temperature, group, vocabulary=size)
