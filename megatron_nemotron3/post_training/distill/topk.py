"""Divergence from the k most probable tokens of a teacher, and from m others.

`topk_divergence` has the k most probable tokens of the teacher, and all others as one more outcome. The k + 1
outcomes are a coarser view of both distributions, so it is at most the divergence of the whole vocabulary,
exactly that if k is the vocabulary, and 0 where the student agrees on the k tokens and on what is left for
the rest. The rest of the student keeps the proportions that it has: nothing teaches it.

Therefore m tokens are drawn from the rest by the teacher's probabilities. For `kl` they stand for the rest,
with the same weight each: over the draws, the mean of the divergence and of its gradient is that of the whole
vocabulary. The other kinds are no mean over the teacher's tokens; they have the k + 1 outcomes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    weighted,
)


class TeacherTokens(NamedTuple):
    """What is kept of a teacher's distribution at n positions."""

    #: [..., k + m]: the k most probable tokens, and m that were drawn from the others.
    ids: Tensor
    #: [..., k + m + 1]: log-probabilities; the last is that of all but the k tokens.
    log_p: Tensor
    #: m
    drawn: int = 0


def most_probable(
    logits: Tensor,
    k: int,
    temperature: float = 1.0,
    group: Any = None,
    *,
    vocabulary: int | None = None,
    quantiles: Tensor | None = None,
) -> TeacherTokens:
    """The k most probable tokens, m tokens drawn from the others, and their log-probabilities.

    Args:
        logits: [n, v / tp] of this rank's part of the vocabulary.
        k, temperature, group, vocabulary: as in `topk_divergence`.
        quantiles: [n, m] in [0, 1) of the others' distribution, equal on all ranks; None: nothing is drawn.
    """
    part = _VocabularyPart(logits, temperature, group, vocabulary)
    few = min(k, part.entries)
    values = part.largest.new_full((len(logits), k), -math.inf)
    ids = torch.zeros(len(logits), k, dtype=torch.long, device=logits.device)
    if few:
        best = logits[:, : part.entries].topk(few)
        values[:, :few], ids[:, :few] = best.values.to(values.dtype), best.indices + part.first
    if part.group is not None:
        values, ids = (torch.cat(all_gathered(each, part.group), 1) for each in (values, ids))
        order = values.topk(k).indices
        values, ids = values.gather(1, order), ids.gather(1, order)
    found, rest = [values / temperature - part.largest[:, None]], part.log_rest(ids)
    if quantiles is not None:
        drawn, of_drawn = _draw(part, ids, quantiles.to(logits.device), rest)
        ids = torch.cat([ids, drawn], 1)
        found.append(of_drawn)
    found.append(_log_sum(rest, part.group)[:, None])
    log_p = (torch.cat(found, 1) - part.log_sum[:, None]).float()
    return TeacherTokens(ids, log_p, ids.shape[1] - k)


def draw_quantiles(rows: int, m: int, seed: int) -> Tensor:
    """Quantiles [rows, m] for `most_probable`: one in each of m equal parts, all at a row's random offset."""
    offsets = torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed))
    return (torch.arange(m) + offsets.double()) / m  # below 1, because offsets have 24 bits


def topk_divergence(
    student: Tensor,
    teacher: TeacherTokens,
    kind: str = "kl",
    temperature: float = 1.0,
    group: Any = None,
    *,
    vocabulary: int | None = None,
) -> Tensor:
    """`divergence` of each token from what `most_probable` returned, with its gradient.

    Args:
        student: logits [..., v / tp] of this rank's part of the vocabulary.
        kind, temperature, group, vocabulary: as in `divergence`.

    Returns:
        [...], nats; the same on all ranks of the group.
    """
    ids, target = (each.reshape(-1, each.shape[-1]) for each in teacher[:2])
    drawn = teacher.drawn
    k, target = ids.shape[1] - drawn, target.to(dtype_of(student))
    if drawn and kind != "kl":
        ids, target, drawn = ids[:, :k], torch.cat([target[:, :k], target[:, -1:]], 1), 0
    # Each drawn token has an equal part of the rest, which is no outcome then.
    share = (target[:, -1:] - math.log(max(drawn, 1))).exp().expand(-1, drawn)
    weights = torch.cat([target[:, :k].exp(), share, torch.zeros_like(target[:, -1:])], 1)

    def compute(logits: Tensor, slope_needed: bool) -> Computed:
        part = _VocabularyPart(logits, temperature, group, vocabulary)
        local = ids.long() - part.first
        inside = (local >= 0) & (local < part.entries)
        found = logits.gather(1, local.clamp(0, max(part.entries - 1, 0))).to(target.dtype) / temperature
        found = (found - part.largest[:, None]).masked_fill(~inside, 0)
        if part.group is not None:
            dist.all_reduce(found, group=part.group)  # each id lies on one rank
        log_rest = torch.full_like(part.largest, -math.inf)
        if not drawn:
            log_rest = _log_sum(part.log_rest(ids), part.group)
        log_q = torch.cat([found, log_rest[:, None]], 1) - part.log_sum[:, None]
        values = weighted(weights, target, log_q) if drawn else terms(target, log_q, kind)
        if not slope_needed:
            return values.sum(-1), None
        slope = -weights if drawn else slopes(target, log_q, kind)
        total = slope.sum(-1, keepdim=True)
        gradient = torch.zeros_like(logits)
        for rows in chunks(logits):
            scaled = part.scaled(rows)
            change = -(scaled - part.log_sum[rows, None]).exp() * total[rows]
            if not drawn:  # the rest's slope, by the student's proportions there
                others = _without(scaled, local[rows]) - log_rest[rows, None]
                change += others.exp().nan_to_num(0) * slope[rows, -1:]
            own = torch.where(inside[rows], local[rows], part.entries)
            wider = torch.nn.functional.pad(change, (0, 1))
            wider.scatter_add_(1, own, slope[rows, :-1])
            gradient[rows, : part.entries] = wider[:, :-1] / temperature
        return values.sum(-1), gradient

    result: Tensor = OnePass.apply(student, compute)
    return result


class _VocabularyPart:
    """Logits [n, v / tp] of this rank's part of a vocabulary."""

    def __init__(self, logits: Tensor, temperature: float, group: Any, vocabulary: int | None) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.first = self.group.rank() * logits.shape[-1] if self.group is not None else 0
        self.entries = real_entries(logits.shape[-1], group, vocabulary)
        self.largest, self.log_sum = normalizer(logits, temperature, group, self.entries)
        self._logits, self._temperature = logits, temperature

    def scaled(self, rows: slice) -> Tensor:
        """logit / T - largest of some rows."""
        some = self._logits[rows, : self.entries].to(self.largest.dtype)
        return some / self._temperature - self.largest[rows, None]

    def log_rest(self, ids: Tensor) -> Tensor:
        """Log of the sum [n] of exp(logit / T - largest) over this rank's entries without the ids [n, k]."""
        result = torch.empty_like(self.largest)
        for rows in chunks(self._logits):
            result[rows] = _without(self.scaled(rows), ids[rows] - self.first).logsumexp(-1)
        return result


def _log_sum(values: Tensor, group: Any) -> Tensor:
    """logsumexp [n] over the ranks of a group."""
    return values if group is None else torch.stack(all_gathered(values, group)).logsumexp(0)


def _draw(part: _VocabularyPart, ids: Tensor, quantiles: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n, m] at these quantiles of all but the ids, and logit / T - largest of each."""
    ranks, rank = (1, 0) if part.group is None else (part.group.size(), part.group.rank())
    each = rest[None] if part.group is None else torch.stack(all_gathered(rest, part.group))
    edges = each.double().softmax(0).cumsum(0)  # each rank has an interval of the quantiles
    edges[-1] = 1
    start = edges[rank - 1] if rank else torch.zeros_like(edges[0])
    here = (quantiles >= start[:, None]) & (quantiles < edges[rank, :, None])
    drawn, values = torch.zeros_like(quantiles, dtype=torch.long), torch.zeros_like(quantiles)
    for rows in chunks(part._logits) if part.entries else ():
        others = _without(part.scaled(rows), ids[rows] - part.first)
        sums = others.double().softmax(-1).cumsum(-1)
        within = (quantiles[rows] - start[rows, None]) / (edges[rank] - start)[rows, None]
        within = (within.nan_to_num(0).clamp(max=1 - 1e-12) * sums[:, -1:]).contiguous()
        place = torch.searchsorted(sums.contiguous(), within, right=True).clamp(max=part.entries - 1)
        drawn[rows] = torch.where(here[rows], place + part.first, 0)
        values[rows] = torch.where(here[rows], others.gather(1, place).double(), 0)
    if ranks > 1:
        dist.all_reduce(drawn, group=part.group)
        dist.all_reduce(values, group=part.group)
    nothing = (each == -math.inf).all(0)[:, None]  # the k tokens are the vocabulary
    return drawn.masked_fill(nothing, 0), values.masked_fill(nothing, -math.inf).to(rest.dtype)


def _without(scaled: Tensor, local: Tensor) -> Tensor:
    """[n, entries] with -inf at the ids `local` [n, k] that lie there."""
    inside = (local >= 0) & (local < scaled.shape[1])
    wider = torch.nn.functional.pad(scaled, (0, 1))  # the others' -inf goes into the last column
    wider.scatter_(1, torch.where(inside, local, scaled.shape[1]), -math.inf)
    return wider[:, :-1]
