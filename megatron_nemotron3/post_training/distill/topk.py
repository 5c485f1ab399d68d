"""Divergence from the k most probable tokens of a teacher.

`topk_divergence` has the k most probable tokens of the teacher, and all others as one more outcome. The k + 1
outcomes are a coarser view of both distributions, so it is at most the divergence of the whole vocabulary,
exactly that if k is the vocabulary, and 0 where the student agrees on the k tokens and on what is left for
the rest. The rest of the student keeps the proportions that it has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.layers.context_parallel import all_gathered
from megatron_nemotron3.post_training.distill.divergences import (
    Computed,
    OnePass,
    chunks,
    dtype_of,
    normalizer,
    real_entries,
    slopes,
    terms,
)


def most_probable(
    logits: Tensor, k: int, temperature: float = 1.0, group: Any = None, *, vocabulary: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k most probable tokens, and the log-probabilities of each and of all others together."""
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
        values, ids = (torch.cat(all_gathered(each, group), 1) for each in (values, ids))
        order = values.topk(k).indices
        values, ids = values.gather(1, order), ids.gather(1, order)
    rest = _rest(logits, ids - first, largest, temperature, entries)
    if parallel:
        dist.all_reduce(rest, group=group)
    log_p = torch.cat([values / temperature - largest[:, None], rest.log()[:, None]], 1) - log_sum[:, None]
    return ids, log_p.float()


def topk_divergence(
    student: Tensor,
    teacher: tuple[Tensor, Tensor],
    kind: str = "kl",
    temperature: float = 1.0,
    group: Any = None,
    *,
    vocabulary: int | None = None,
) -> Tensor:
    """`divergence` of each token over the k + 1 outcomes of `most_probable`, with its gradient."""
    entries, dtype = real_entries(student.shape[-1], group, vocabulary), dtype_of(student)
    parallel = group is not None and group.size() > 1
    ids, target = (each.reshape(-1, each.shape[-1]) for each in teacher)
    local, target = ids.long() - (group.rank() * student.shape[-1] if parallel else 0), target.to(dtype)

    def compute(logits: Tensor, slope_needed: bool) -> Computed:
        largest, log_sum = normalizer(logits, temperature, group, entries)
        inside = (local >= 0) & (local < entries)
        found = logits.gather(1, local.clamp(0, max(entries - 1, 0))).to(dtype) / temperature
        found = (found - largest[:, None]).masked_fill(~inside, 0)
        sums = torch.cat([found, _rest(logits, local, largest, temperature, entries)[:, None]], 1)
        if parallel:
            dist.all_reduce(sums, group=group)  # each id lies on one rank
        log_q = torch.cat([sums[:, :-1], sums[:, -1:].log()], 1) - log_sum[:, None]
        values = terms(target, log_q, kind).sum(-1)
        if not slope_needed:
            return values, None
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
        return values, gradient

    result: Tensor = OnePass.apply(student, compute)
    return result


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
