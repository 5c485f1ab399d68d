"""A teacher with another tokenizer in the student's run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_nemotron3.distill.lessons import borders_of, gathered
from megatron_nemotron3.distill.settings import Distillation
from megatron_nemotron3.distill.teacher import Teacher
from megatron_nemotron3.layers.context_parallel import zigzag
from megatron_nemotron3.monitor.settings import megatron_options
from megatron_nemotron3.xtoken.align import Aligner, Alignment
from megatron_nemotron3.xtoken.loss import span_losses
from megatron_nemotron3.xtoken.projection import read_for
from megatron_nemotron3.xtoken.tokens import Vocabulary, find

#: The teacher's rows are padded to a multiple of this, so that few lengths occur.
_STEP = 64


class AcrossTokenizers:
    """Retokenizes each micro-batch for the teacher, and spreads the loss of a span over its tokens.

    Args:
        teacher: the model; `chunk` runs here.
        groups: process groups of both.
        student, tokenizer: where the tokenizers of student and teacher are.

    Raises:
        ValueError: the projection is for other tokenizers, or cannot be read.
    """

    def __init__(
        self, teacher: Teacher, chunk: Any, groups: Any, how: Distillation, student: Path, tokenizer: Path
    ) -> None:
        self._teacher, self._chunk, self._how = teacher, chunk, how
        self._tp, self._cp = groups.tp, groups.cp
        ours, theirs = Vocabulary(find(student)), Vocabulary(find(tokenizer))
        self._projection = read_for(Path(how.projection), ours, theirs)
        self._aligner = Aligner(ours, theirs)
        self._hidden: Tensor | None = None
        self._alignment: Alignment | None = None

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        """Run the teacher on the text of input_ids and of the last labels, both [b, s / cp]."""
        ids, cp = given["input_ids"], self._cp.size()
        packed = given.get("packed_seq_params")
        length = tokens * cp
        borders, ends = borders_of(packed, length)
        each = 2 * cp if cp > 1 else 1
        step = _STEP * self._tp.size() * cp
        if borders is None:
            whole = gathered(torch.stack([ids, given["labels"]], -1), ends, self._cp)
            others, alignment = self._aligner.batch(
                torch.cat([whole[..., 0], whole[:, -1:, 1]], 1).tolist(), step=step
            )
            documents = [0, others.shape[1]]
        else:
            texts = self._documents(given, borders, ends)
            others, documents, alignment = self._aligner.pack(texts, length, each, step)
        here = [torch.arange(n) for n in (length, others.shape[1])]
        if cp > 1:
            here = [zigzag(all_, cp, self._cp.rank()) for all_ in (ends, documents)]
        mine = alignment.part(*here)
        self._alignment = replace(mine, student=mine.student.T, teacher=mine.teacher.T).to(ids.device)
        others = others[:, here[1]].to(ids.device)
        arguments = {
            "input_ids": others,
            "position_ids": here[1].to(ids.device).expand_as(others),
            "attention_mask": None,
            "packed_seq_params": None if borders is None else _packed(documents, ids.device),
        }
        self._hidden = self._teacher.forward(self._chunk, arguments, others.shape[1], len(others))

    def _documents(
        self, given: dict[str, Any], borders: Tensor, ends: list[int]
    ) -> list[tuple[int, list[int]]]:
        """Place and tokens of each document of a packed row, with its last label if the loss counts it."""
        ids, mask, padding = given["input_ids"], given.get("loss_mask"), given.get("padding_mask")
        counts = torch.ones_like(ids) if mask is None else mask > 0
        real = torch.ones_like(ids) if padding is None else ~padding.bool()
        parts = torch.stack([ids, given["labels"], counts.long(), real.long()], -1)
        (row,) = gathered(parts, ends, self._cp).cpu()
        lengths = given["packed_seq_params"].cu_seqlens_q.cpu().diff().tolist()
        found = []
        for start, length in zip(borders.tolist(), lengths):
            text, labels, counted, known = row[start : start + length].T
            if n := int(known.sum()):
                found.append((start, text[:n].tolist() + [int(labels[n - 1])] * int(counted[n - 1])))
        return found

    def divergence(self, logits: Tensor) -> Tensor:
        """Logits [s / cp, b, v / tp] of the student -> [s / cp, b], nats: a span's parts sum to its loss."""
        assert self._hidden is not None and self._alignment is not None
        target, self._hidden = self._teacher.logits(self._hidden), None
        losses = span_losses(
            logits,
            target,
            self._alignment,
            self._projection,
            "h-kl" if self._how.kind == "h-kl" else "p-kl",
            temperature=self._how.temperature,
            group=self._tp,
            context=self._cp,
        )
        shares = torch.nn.functional.pad(losses / self._alignment.sizes[0], (0, 1))
        return shares[self._alignment.student]  # -1, no span, is the zero at the end


def across_tokenizers(teacher: Teacher, student: HybridModel, how: Distillation) -> AcrossTokenizers:
    """A chunk of a teacher in the same run that reads the text in its own tokens.

    Raises:
        ValueError: the script has no --tokenizer-model, or the projection is for other tokenizers.
    """
    ours, theirs = getattr(megatron_options(), "tokenizer_model", None), teacher.found.tokenizer
    if ours is None or theirs is None:
        raise ValueError("projection= needs --tokenizer-model, and a tokenizer.json beside the teacher")
    return AcrossTokenizers(teacher, teacher.add(student), student.pg_collection, how, Path(ours), theirs)


def _packed(documents: list[int], device: torch.device) -> PackedSeqParams:
    borders = torch.tensor(documents, dtype=torch.int32)
    longest, borders = int(borders.diff().max()), borders.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=borders,
        cu_seqlens_kv_padded=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=documents[-1],
    )
