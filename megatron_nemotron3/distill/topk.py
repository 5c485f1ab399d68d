"""Divergence from the k most probable tokens of a teacher; all others are one more outcome.

The k + 1 outcomes are a coarser view of both distributions, so the divergence is at most that of the whole
vocabulary, exactly that if k is the vocabulary, and 0 where the student agrees on the k tokens and on what is
left for the rest. The rest of the student keeps the proportions that it has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.distill.divergence import chunks, dtype_of, normalizer, real_entries, slopes, terms


def most_probable(
    logits: Tensor, k: int, temperature: float = 1.0, group: Any = None, *, vocabulary: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k most probable tokens, and the log-probabilities of each and of all others together.

    Args:
        logits, temperature, group, vocabulary: as of `divergence`; logits [n, v / tp].
        k: at most the number of entries.

    Returns:
        Ids [n, k] in the order of their probabilities, and log-probabilities [n, k + 1] in FP32; the same on
        all ranks of the group.
    """
    entries = real_entries(logits.shape[-1], group, vocabulary)
    parallel = group is not None and group.size() > 1
    first = group.rank() * logits.shape[-1] if parallel else 0
    largest, log_sum = normalizer(logits, temperature, group, entries)
    few = min(k, entries)
    values = logits.new_full((len(logits), k), -math.inf, dtype=dtype_of(logits))
    ids = torch.zeros(len(logits), k, dtype=torch.long, device=logits.device)
    if few:
        best = logits[:, :entries].topk(few)
        values[:, :few], ids[:, :few] = best.values.to(values.dtype), best.indices + first
    if parallel:
        values, ids = (_gathered(each, group) for each in (values, ids))
        order = values.topk(k).indices
        values, ids = values.gather(1, order), ids.gather(1, order)
    rest = _rest(logits, ids - first, largest, temperature, entries)
    if parallel:
        dist.all_reduce(rest, group=group)
    log_p = torch.cat([values / temperature - largest[:, None], rest.log()[:, None]], 1) - log_sum[:, None]
    return ids, log_p.float()


def topk_divergence(
    student: Tensor,
    ids: Tensor,
    log_p: Tensor,
    kind: str = "kl",
    temperature: float = 1.0,
    group: Any = None,
    *,
    vocabulary: int | None = None,
) -> Tensor:
    """Divergence of each token over the k + 1 outcomes of `most_probable`, with its gradient.

    Args:
        student, kind, temperature, group, vocabulary: as of `divergence`; logits [..., v / tp].
        ids, log_p: [..., k] and [..., k + 1] of the teacher at the same temperature.

    Returns:
        [...], nats; the same on all ranks of the group.
    """
    entries = real_entries(student.shape[-1], group, vocabulary)
    result: Tensor = _Divergence.apply(student, ids, log_p, kind, temperature, group, entries)
    return result


def _gathered(mine: Tensor, group: Any) -> Tensor:
    """[n, k] of each rank -> [n, tp * k]."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, 1)


def _rest(logits: Tensor, local: Tensor, largest: Tensor, temperature: float, entries: int) -> Tensor:
    """Sum [n] of exp(logit / T - largest) over this rank's entries that are not among the ids `local`."""
    result = torch.zeros_like(largest)
    for rows in chunks(logits):
        weights = (logits[rows, :entries].to(largest.dtype) / temperature - largest[rows, None]).exp()
        result[rows] = _without(weights, local[rows]).sum(-1)
    return result


def _without(weights: Tensor, local: Tensor) -> Tensor:
    """[n, entries] with 0 at the ids `local` [n, k] that lie there."""
    inside = (local >= 0) & (local < weights.shape[1])
    wider = torch.nn.functional.pad(weights, (0, 1))  # the others' zero goes into the last column
    wider.scatter_(1, torch.where(inside, local, weights.shape[1]), 0.0)
    return wider[:, :-1]


class _Divergence(torch.autograd.Function):
    """The divergence, and in the same pass its gradient, which is all that is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        ids: Tensor,
        log_p: Tensor,
        kind: str,
        temperature: float,
        group: Any,
        entries: int,
    ) -> Tensor:
        """As `topk_divergence`; `entries` of this rank are no padding."""
        shape, dtype = student.shape, dtype_of(student)
        parallel = group is not None and group.size() > 1
        logits, target = student.reshape(-1, shape[-1]), log_p.reshape(-1, log_p.shape[-1]).to(dtype)
        local = ids.reshape(len(logits), -1).long() - (group.rank() * shape[-1] if parallel else 0)
        largest, log_sum = normalizer(logits, temperature, group, entries)
        inside = (local >= 0) & (local < entries)
        found = logits.gather(1, local.clamp(0, max(entries - 1, 0))).to(dtype) / temperature
        sums = torch.cat(
            [
                (found - largest[:, None]).masked_fill(~inside, 0),
                _rest(logits, local, largest, temperature, entries)[:, None],
            ],
            1,
        )
        if parallel:
            dist.all_reduce(sums, group=group)  # each id lies on one rank
        log_q = torch.cat([sums[:, :-1], sums[:, -1:].log()], 1) - log_sum[:, None]
        if ctx.needs_input_grad[0]:
            slope = slopes(target, log_q, kind)
            total = slope.sum(-1, keepdim=True)
            rest = torch.where(log_q[:, -1:] == -math.inf, 0, slope[:, -1:] / log_q[:, -1:].exp())
            gradient = torch.zeros_like(logits)
            for rows in chunks(logits):
                scaled = logits[rows, :entries].to(dtype) / temperature - largest[rows, None]
                q = (scaled - log_sum[rows, None]).exp()
                change = _without(q, local[rows]) * rest[rows] - q * total[rows]
                own = torch.where(inside[rows], local[rows], entries)
                wider = torch.nn.functional.pad(change, (0, 1))
                wider.scatter_add_(1, own, slope[rows, :-1])
                gradient[rows, :entries] = wider[:, :-1] / temperature
            ctx.save_for_backward(gradient.view(shape))
        return terms(target, log_q, kind).sum(-1).view(shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """[...] -> [..., v / tp]."""
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[..., None]).to(gradient.dtype), None, None, None, None, None, None
