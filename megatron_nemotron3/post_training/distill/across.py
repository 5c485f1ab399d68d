"""A teacher with another tokenizer in the student's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad

from megatron_nemotron3.common.switches import megatron_options
from megatron_nemotron3.layers.context_parallel import borders_of, gathered, zigzag
from megatron_nemotron3.post_training.distill.teacher import Teacher, TeacherChunk
from megatron_nemotron3.post_training.xtoken.align import Aligner, Alignment
from megatron_nemotron3.post_training.xtoken.loss import RankGroups, SpanLoss, span_losses
from megatron_nemotron3.train.data.packing import conversation_multiple, pack_arguments
from megatron_nemotron3.train.teacher.projection import read_for
from megatron_nemotron3.train.teacher.settings import Distillation
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary, find


class AcrossTokenizers:
    """Retokenizes each micro-batch for the teacher, and spreads the loss of a span over its tokens.

    The first stage of the student does it, and tells the others: no other stage has the tokens.

    Args:
        chunk: of the teacher.
        groups: process groups of the student.
        student, teacher: where their tokenizers are.
    """

    def __init__(
        self, chunk: TeacherChunk, groups: Any, how: Distillation, student: Path, teacher: Path
    ) -> None:
        self._chunk, self._how = chunk, how
        self._tp, self._cp = groups.tp, groups.cp
        ours, theirs = ByteVocabulary(find(student)), ByteVocabulary(find(teacher))
        self._projection = read_for(Path(how.projection), ours, theirs)
        self._aligner = Aligner(ours, theirs)
        self._hidden: Tensor | None = None
        self._alignment: Alignment | None = None

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        """Run the teacher on the text of input_ids [b, s / cp], of packed rows also on their last labels."""
        note = self._chunk.from_first_stage(lambda: self._aligned(given, tokens * self._cp.size()))
        ids, ours, theirs, sizes, borders, *_ = note
        self._alignment = Alignment(ours.T, theirs.T, sizes.shape[1], (sizes[0], sizes[1]))
        length, packed = ids.shape[1], None
        if borders.numel():
            ends = borders[0].int()
            arguments = pack_arguments(ends, int(ends.diff().max()), length * self._cp.size())
            packed = PackedSeqParams(qkv_format="thd", **arguments)
        inputs = {"input_ids": ids, "packed_seq_params": packed}
        self._hidden = self._chunk.forward(inputs, length, rows)

    def _aligned(self, given: dict[str, Any], length: int) -> list[Tensor]:
        """The teacher's tokens and the alignment of this context rank, and borders of packed documents."""
        ids, cp = given["input_ids"], self._cp.size()
        borders, ends = borders_of(given.get("packed_seq_params"), length)
        if borders is None:
            others, alignment = self._aligner.batch(gathered(ids, ends, self._cp).tolist())
            documents = [0]
        else:
            texts = self._documents(given, borders, ends)
            others, documents, alignment = self._aligner.pack(texts, length, conversation_multiple(cp))
        total = self._chunk.length(others.shape[1])
        documents += [total] * (documents[-1] < total)
        more = (0, total - others.shape[1])
        # What the last token of a row is followed by, the first stage does not know.
        ours = pad(alignment.student, (0, length - alignment.student.shape[1]), value=-1)
        parts = [pad(others, more), ours, pad(alignment.teacher, more, value=-1)]
        if cp > 1:
            places = (documents, ends, documents)
            parts = [one[:, zigzag(at, cp, self._cp.rank())] for one, at in zip(parts, places)]
        parts += [torch.stack(list(alignment.sizes)), torch.tensor([[] if borders is None else documents])]
        return [one.to(ids.device, torch.int64) for one in parts]

    def _documents(
        self, given: dict[str, Any], borders: Tensor, ends: list[int]
    ) -> list[tuple[int, list[int]]]:
        """Place and tokens of each document of a packed row, with its last label if the loss counts it."""
        ids, mask, padding = given["input_ids"], given.get("loss_mask"), given.get("padding_mask")
        if given.get("labels") is None:
            raise ValueError(
                "projection= with packed rows needs labels on the first pipeline stage, where this script "
                "has none: use nemotron3 train, or no pipeline parallelism"
            )
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
        target, self._hidden = self._chunk.logits(self._hidden), None
        loss = SpanLoss("h-kl" if self._how.kind == "h-kl" else "p-kl", self._how.temperature)
        groups = RankGroups(self._tp, self._cp)
        losses = span_losses(logits, target, self._alignment, self._projection, loss, groups)
        shares = pad(losses / self._alignment.sizes[0], (0, 1))
        return shares[self._alignment.student]  # -1, no span, is the zero at the end


def across_tokenizers(teacher: Teacher, student: HybridModel, how: Distillation) -> AcrossTokenizers:
    """A chunk of a teacher in the same run that reads the text in its own tokens."""
    ours, theirs = getattr(megatron_options(), "tokenizer_model", None), teacher.found.tokenizer
    if ours is None or theirs is None:
        raise ValueError("projection= needs --tokenizer-model, and a tokenizer.json beside the teacher")
    return AcrossTokenizers(teacher.add(student), student.pg_collection, how, Path(ours), theirs)
