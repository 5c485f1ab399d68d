"""A teacher with another tokenizer in the student's run (`distill.attach.Lesson`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_nemotron3.xtoken.align import Aligner, Alignment
from megatron_nemotron3.xtoken.loss import Kind, span_losses
from megatron_nemotron3.xtoken.projection import read_for
from megatron_nemotron3.xtoken.tokens import Vocabulary, find

#: The teacher's rows are padded to a multiple of this, so that few lengths occur.
_STEP = 64


class Model(Protocol):
    """The teacher: what `distill.teacher.Teacher` does once a chunk is built."""

    def forward(self, chunk: Any, given: dict[str, Any], tokens: int, rows: int) -> Tensor | None:
        """Hidden states [m, b, h] of a micro-batch."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, b, h] -> [m, b, u / tp]."""


class AcrossTokenizers:
    """Retokenizes each micro-batch for the teacher, and spreads the loss of a span over its tokens.

    Args:
        teacher, chunk: the model and the chunk of it that runs.
        projection, student, tokenizer: the file, and where the tokenizers of student and teacher are.
        group: tensor-parallel group of both.

    Raises:
        ValueError: the projection is for other tokenizers, or cannot be read.
    """

    def __init__(
        self,
        teacher: Model,
        chunk: Any,
        *,
        projection: Path,
        student: Path,
        tokenizer: Path,
        kind: Kind,
        temperature: float,
        group: Any = None,
    ) -> None:
        self._teacher, self._chunk, self._group = teacher, chunk, group
        self._kind, self._temperature = kind, temperature
        ours, theirs = Vocabulary(find(student)), Vocabulary(find(tokenizer))
        self._projection = read_for(projection, ours, theirs)
        self._aligner = Aligner(ours, theirs)
        self._size = 1 if group is None else group.size()
        self._hidden: Tensor | None = None
        self._alignment: Alignment | None = None

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        """Run the teacher on the text of input_ids and of the last label, both [b, s]."""
        ids, labels = given["input_ids"], given["labels"]
        sequences = torch.cat([ids, labels[:, -1:]], 1).tolist()
        others, alignment = self._aligner.batch(sequences, step=_STEP * self._size)
        self._alignment = Alignment(alignment.student.T, alignment.teacher.T, alignment.spans).to(ids.device)
        length = others.shape[1]
        arguments = {
            "input_ids": others.to(ids.device),
            "position_ids": torch.arange(length, device=ids.device).expand(len(others), -1),
            "attention_mask": None,
        }
        self._hidden = self._teacher.forward(self._chunk, arguments, length, rows)

    def divergence(self, logits: Tensor) -> Tensor:
        """Logits [s, b, v / tp] of the student -> [s, b], nats: the parts of a span's loss sum to it."""
        assert self._hidden is not None and self._alignment is not None
        target, self._hidden = self._teacher.logits(self._hidden), None
        losses = span_losses(
            logits,
            target,
            self._alignment,
            self._projection,
            self._kind,
            temperature=self._temperature,
            group=self._group,
        )
        ids = self._alignment.student
        inside = ids >= 0
        counts = torch.bincount(ids[inside], minlength=self._alignment.spans)
        result = losses.new_zeros(ids.shape)
        result[inside] = (losses / counts)[ids[inside]]
        return result
