"""Divergence between the next-token distributions of a student and a teacher, token by token.

With p = softmax(teacher / T) and q = softmax(student / T), in nats:

    kl          sum p (log p - log q)             KL(teacher || student), forward KL
    reverse-kl  sum q (log q - log p)             KL(student || teacher)
    js          (KL(p || m) + KL(q || m)) / 2     m = (p + q) / 2, at most log 2
    tv          sum |p - q| / 2                   total variation, at most 1

`divergence` computes it on logits whose vocabulary is shared by tensor-parallel ranks, and keeps one tensor
of the student's dtype for its backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.train.teacher.settings import KINDS

#: Logits that are computed in FP32 at a time: 16 MiB for each intermediate tensor.
_AT_ONCE = 2**22


def divergence(
    student: Tensor,
    teacher: Tensor,
    kind: str = "kl",
    temperature: float = 1.0,
    group: Any = None,
    *,
    vocabulary: int | None = None,
) -> Tensor:
    """Divergence of each token's distributions; the gradient goes to the student only.

    The gradient with respect to the logits has a factor 1 / T, and that of the divergence shrinks with
    another: multiply by T ** 2 for gradients whose size does not depend on T.

    Args:
        student, teacher: logits [..., v / tp] of this rank's part of the vocabulary, of any floating dtype.
            Computed in FP32, or in FP64 if the student is FP64.
        kind: of `KINDS`.
        temperature: T, by which both logits are divided.
        group: tensor-parallel process group that shares the vocabulary; None: this rank has all of it.
        vocabulary: number of entries without padding; the rest has no probability. None: there is no padding.

    Returns:
        [...], nats; the same on all ranks of the group.

    Raises:
        ValueError: an unknown kind, a temperature that is not positive, or shapes that differ.
    """
    _check(student, teacher, kind, temperature)
    entries, dtype = real_entries(student.shape[-1], group, vocabulary), dtype_of(student)
    target = teacher.detach().reshape(-1, teacher.shape[-1])

    def compute(logits: Tensor, slope_needed: bool) -> Computed:
        norms = [normalizer(each, temperature, group, entries) for each in (logits, target)]

        def log_probabilities(rows: slice) -> tuple[Tensor, Tensor]:
            log_q, log_p = (
                each[rows, :entries].to(dtype) / temperature - largest[rows, None] - log_sum[rows, None]
                for each, (largest, log_sum) in zip((logits, target), norms, strict=True)
            )
            return log_p, log_q

        #: Divergence, and the sum of the slopes: [2, n].
        sums = torch.zeros(2, len(logits), dtype=dtype, device=logits.device)
        for rows in chunks(logits):
            log_p, log_q = log_probabilities(rows)
            sums[0, rows] = terms(log_p, log_q, kind).sum(-1)
            sums[1, rows] = slopes(log_p, log_q, kind).sum(-1)
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
        if not slope_needed:
            return sums[0], None
        gradient = torch.zeros_like(logits)
        for rows in chunks(logits):
            log_p, log_q = log_probabilities(rows)
            change = slopes(log_p, log_q, kind) - log_q.exp() * sums[1, rows, None]
            gradient[rows, :entries] = change / temperature
        return sums[0], gradient

    result: Tensor = OnePass.apply(student, compute)
    return result


def terms(log_p: Tensor, log_q: Tensor, kind: str) -> Tensor:
    """What each outcome adds to the divergence, of the shape of the log-probabilities of teacher and student.

    An outcome of probability 0 adds what the limit is: log-probabilities may be -inf.
    """
    p, q = log_p.exp(), log_q.exp()
    if kind == "kl":
        return weighted(p, log_p, log_q)
    if kind == "reverse-kl":
        return weighted(q, log_q, log_p)
    if kind == "tv":
        return (p - q).abs() / 2
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return (weighted(p, log_p, middle) + weighted(q, log_q, middle)) / 2


def weighted(weight: Tensor, of: Tensor, to: Tensor) -> Tensor:
    """weight * (of - to), 0 where the weight is."""
    nothing = weight == 0
    return weight * (of.masked_fill(nothing, 0) - to.masked_fill(nothing, 0))


def slopes(log_p: Tensor, log_q: Tensor, kind: str) -> Tensor:
    """Derivative of the divergence by q times q, up to a multiple of q, which softmax removes."""
    q = log_q.exp()
    if kind == "kl":
        return -log_p.exp()
    if kind == "reverse-kl":
        return weighted(q, log_q, log_p)
    if kind == "tv":
        return q * (q - log_p.exp()).sign() / 2
    return weighted(q, log_q, torch.logaddexp(log_p, log_q) - math.log(2)) / 2


def _check(student: Tensor, teacher: Tensor, kind: str, temperature: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"divergence {kind!r}: use one of {', '.join(KINDS)}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature}: give a positive number")
    if student.shape != teacher.shape:
        raise ValueError(
            f"logits of the student {list(student.shape)} and of the teacher {list(teacher.shape)} differ in "
            "shape: both need the same tokens and the same part of one vocabulary"
        )


def dtype_of(student: Tensor) -> torch.dtype:
    """Type in which a divergence is computed."""
    return torch.float64 if student.dtype == torch.float64 else torch.float32


def real_entries(local: int, group: Any, vocabulary: int | None) -> int:
    """Entries of this rank's part of the vocabulary that are no padding."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if vocabulary is None:
        return local
    if not 0 < vocabulary <= local * ranks:
        raise ValueError(f"vocabulary {vocabulary}: the logits have {local * ranks} entries")
    return min(max(vocabulary - rank * local, 0), local)


def normalizer(logits: Tensor, temperature: float, group: Any, entries: int) -> tuple[Tensor, Tensor]:
    """The largest logit / T of each token, and the log of the sum of exp(logit / T - largest).

    They are apart because their sum would round the second away where logits are large.
    """
    dtype, parallel = dtype_of(logits), group is not None and group.size() > 1
    largest = torch.full(logits.shape[:1], -math.inf, dtype=dtype, device=logits.device)
    if entries:
        largest = logits[:, :entries].amax(-1).to(dtype) / temperature
    if parallel:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = torch.zeros_like(largest)
    for rows in chunks(logits):
        total[rows] = (logits[rows, :entries].to(dtype) / temperature - largest[rows, None]).exp().sum(-1)
    if parallel:
        dist.all_reduce(total, group=group)
    return largest, total.log()


def chunks(logits: Tensor) -> Iterator[slice]:
    """Rows [n, v] that are computed at a time."""
    step = max(1, _AT_ONCE // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


class OnePass(torch.autograd.Function):
    """A loss [...] of logits [..., v / tp] that is computed with its gradient, which is all that is kept.

    The second argument of `apply` does it: of logits, and whether the gradient is needed.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, compute: Callable[[Tensor, bool], Computed]) -> Tensor:
        values, gradient = compute(logits.reshape(-1, logits.shape[-1]), ctx.needs_input_grad[0])
        if gradient is not None:
            ctx.save_for_backward(gradient.view(logits.shape))
        return values.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[..., None]).to(gradient.dtype), None


#: Values [n], and their gradient [n, v / tp] if it is needed.
Computed = tuple[Tensor, Tensor | None]
