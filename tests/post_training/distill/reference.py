"""The divergence of whole vocabularies by its definition, in plain operations."""

from __future__ import annotations

from torch import Tensor

from megatron_nemotron3.post_training.distill.divergences import dtype_of, terms


def reference(
    student: Tensor,
    teacher: Tensor,
    kind: str = "kl",
    temperature: float = 1.0,
    *,
    vocabulary: int | None = None,
) -> Tensor:
    """`divergence` of logits [..., v]."""
    dtype = dtype_of(student)
    log_q = (student[..., :vocabulary].to(dtype) / temperature).log_softmax(-1)
    log_p = (teacher.detach()[..., :vocabulary].to(dtype) / temperature).log_softmax(-1)
    return terms(log_p, log_q, kind).sum(-1)
