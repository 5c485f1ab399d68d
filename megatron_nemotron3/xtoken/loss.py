"""P-KL and H-KL: how far the student's distribution of a span is from a teacher's with another vocabulary.

n, m: positions of the student and of the teacher; v, u: their vocabularies, padded; p: ranks that share them.
docs/xtoken.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_nemotron3.xtoken import sums
from megatron_nemotron3.xtoken.align import Alignment
from megatron_nemotron3.xtoken.projection import COMMON, Projection

Kind = Literal["p-kl", "h-kl"]
#: Probability of a teacher's token that no token of the student stands for.
FLOOR = 1e-10
#: Probabilities of unpaired tokens that H-KL compares.
UNPAIRED = 8192


def span_losses(
    student: Tensor,
    teacher: Tensor,
    alignment: Alignment,
    projection: Projection,
    kind: Kind = "p-kl",
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    threshold: float = COMMON,
    reverse: bool = False,
    group: Any = None,
) -> Tensor:
    """Compute the loss of each span in nats; the gradient goes to the student alone.

    Args:
        student: logits [..., v / p]; leading dimensions are those of `alignment.student`.
        teacher: logits [..., u / p]; leading dimensions are those of `alignment.teacher`.
        kind: "p-kl" projects the student's probabilities into the teacher's vocabulary; "h-kl" compares the
            tokens that the projection pairs, and the sorted probabilities of the others.
        temperature: divides both logits. The factor of its square is the caller's.
        top_k: P-KL over this many of the teacher's tokens, those with the largest logits anywhere in the
            call, renormalized; None: all of them. H-KL takes all.
        threshold: least weight of a pair of H-KL; 1 pairs only equal tokens, as GOLD does.
        reverse: the divergence from the student to the teacher.
        group: the tensor-parallel group that shares both vocabularies; None: whole vocabularies.

    Returns:
        [spans], equal on all ranks of the group.

    Raises:
        ValueError: shapes do not fit the alignment, or logits are fewer than the tokens of a vocabulary.
    """
    size = sums.ranks(group)[1]
    for role, logits, ids, tokens in (
        ("student", student, alignment.student, projection.student_size),
        ("teacher", teacher, alignment.teacher, projection.teacher_size),
    ):
        if logits.shape[:-1] != ids.shape:
            raise ValueError(
                f"the {role}'s logits {tuple(logits.shape)} do not fit an alignment of {tuple(ids.shape)}"
            )
        if logits.shape[-1] * size < tokens:
            raise ValueError(
                f"the {role} has {logits.shape[-1] * size} logits, its tokenizer {tokens} tokens: give the "
                "projection of its tokenizer"
            )
    if alignment.spans == 0:
        return student.flatten()[:0].float()
    ours = _Side(student, alignment.student, alignment.spans, projection.student_size, temperature, group)
    theirs = _Side(
        teacher.detach(), alignment.teacher, alignment.spans, projection.teacher_size, temperature, group
    )
    with torch.autocast(student.device.type, enabled=False):
        if kind == "h-kl":
            return _h_kl(ours, theirs, projection, threshold, reverse, group)
        if kind != "p-kl":
            raise ValueError(f"kind {kind!r}: give 'p-kl' or 'h-kl'")
        if top_k is not None and top_k < projection.teacher_size:
            return _p_kl_of_columns(ours, theirs, projection, top_k, reverse, group)
        return _p_kl(ours, theirs, projection, reverse, group)


class _Side:
    """Logits of one model on this rank, and the means of its positions over spans."""

    def __init__(
        self, logits: Tensor, ids: Tensor, spans: int, tokens: int, temperature: float, group: Any
    ) -> None:
        self.ids, self.spans, self.width = ids.flatten(), spans, logits.shape[-1]
        self.first = sums.ranks(group)[0] * self.width
        #: Which columns are tokens; the others pad the vocabulary.
        self.real = torch.arange(self.first, self.first + self.width, device=logits.device) < tokens
        scaled = logits.reshape(-1, self.width).float() / temperature
        #: [n, v / p], minus infinity where padded.
        self.logits = scaled.masked_fill(~self.real, -torch.inf)
        self.group = group

    def log_softmax(self) -> Tensor:
        """Log-probabilities [n, v / p] over the whole vocabulary; 0 where padded."""
        top = sums.largest(self.logits.amax(-1, keepdim=True), self.group)
        shifted = self.logits - top
        normalizer = sums.shared_total(shifted.exp().sum(-1, keepdim=True), self.group).log()
        return torch.where(self.real, shifted - normalizer, 0.0)

    def probabilities(self) -> Tensor:
        """Probabilities [n, v / p]; 0 where padded."""
        return self.log_softmax().exp() * self.real

    def mean(self, values: Tensor) -> Tensor:
        """Mean [spans, …] of values by position [n, …]."""
        inside = self.ids >= 0
        ids = self.ids[inside]
        result = values.new_zeros((self.spans, values.shape[-1])).index_add(0, ids, values[inside])
        return result / torch.bincount(ids, minlength=self.spans)[:, None]


def _p_kl(ours: _Side, theirs: _Side, projection: Projection, reverse: bool, group: Any) -> Tensor:
    matrix, reached = _matrix(projection, ours, theirs, _projected)
    # [u / p, spans]: the product is linear, so spans go through it rather than positions.
    ours_there = sums.scattered_total(matrix @ ours.mean(ours.probabilities()).T, group).T
    target = theirs.mean(theirs.log_softmax())
    mass = sums.shared_total(ours_there.sum(-1, keepdim=True), group)
    return sums.total(_divergence(ours_there / _positive(mass), target, reached, theirs.real, reverse), group)


def _p_kl_of_columns(
    ours: _Side, theirs: _Side, projection: Projection, top_k: int, reverse: bool, group: Any
) -> Tensor:
    importance = sums.gathered(theirs.logits.amax(0), group)
    columns = importance.topk(top_k).indices.sort().values
    matrix, reached = _matrix(projection, ours, theirs, _projected)
    chosen = matrix.index_select(0, columns)
    ours_there = sums.total(chosen @ ours.mean(ours.probabilities()).T, group).T
    here = columns - theirs.first
    mine = (here >= 0) & (here < theirs.width)
    logits = theirs.logits[:, here.clamp(0, theirs.width - 1)]
    target = theirs.mean(sums.total(torch.where(mine, logits, 0.0), group).log_softmax(-1))
    mass = ours_there.sum(-1, keepdim=True)
    everywhere = sums.gathered(reached, group)[columns]
    return _divergence(ours_there / _positive(mass), target, everywhere, torch.ones_like(everywhere), reverse)


def _divergence(ours: Tensor, target: Tensor, reached: Tensor, real: Tensor, reverse: bool) -> Tensor:
    """Sum over this rank's columns. `target`: the teacher's mean log-probabilities."""
    floor = torch.full((), FLOOR, device=ours.device).log()
    log = torch.where(reached, _positive(ours).log(), floor)
    terms = ours * (log - target) if reverse else target.exp() * (target - log)
    return torch.where(real, terms, 0.0).sum(-1)


def _positive(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(torch.float32).tiny)


def _h_kl(
    ours: _Side, theirs: _Side, projection: Projection, threshold: float, reverse: bool, group: Any
) -> Tensor:
    ours_mean, target = ours.mean(ours.log_softmax()), theirs.mean(theirs.log_softmax())

    def pairs(projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
        students, teachers = map(torch.from_numpy, projection.common(threshold))
        return students, teachers, torch.ones(len(students))

    matrix, paired = _matrix(projection, ours, theirs, pairs, key=threshold)
    # The student's log-probabilities in the places of the teacher's tokens.
    ours_there = sums.scattered_total(matrix @ ours_mean.T, group).T
    apart = ours_there - target if reverse else target - ours_there
    weight = ours_there.exp() if reverse else target.exp()
    common = sums.total(torch.where(paired, weight * apart, 0.0).sum(-1), group)
    students = torch.from_numpy(projection.common(threshold)[0]).to(ours_mean.device) - ours.first
    unpaired = ours.real.clone()
    unpaired[students[(students >= 0) & (students < ours.width)]] = False
    count = len(students)
    most = min(projection.student_size - count, projection.teacher_size - count, UNPAIRED)
    if most == 0:
        return common
    rest = _sorted(ours_mean.exp() * unpaired, most, group)
    return common + (rest - _sorted(target.exp() * (theirs.real & ~paired), most, group)).abs().sum(-1)


def _sorted(values: Tensor, most: int, group: Any) -> Tensor:
    """The largest values [spans, most] over all ranks, which have [spans, v / p] each."""
    here = values.topk(min(most, values.shape[-1]), dim=-1).values
    return sums.gathered(here.T, group).T.topk(most, dim=-1).values


def _projected(projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """Student's token, teacher's token and weight of each entry."""
    tokens, weights = torch.from_numpy(projection.tokens.copy()), torch.from_numpy(projection.weights.copy())
    kept = (tokens >= 0) & (weights > 0)
    return kept.nonzero()[:, 0], tokens[kept].long(), weights[kept]


def _matrix(
    projection: Projection,
    ours: _Side,
    theirs: _Side,
    entries: Callable[[Projection], tuple[Tensor, Tensor, Tensor]],
    *,
    key: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The sparse matrix [u, v / p] from this rank's part of the student's vocabulary to the teacher's.

    Returns:
        the matrix, and which of this rank's teacher columns it reaches from any rank, [u / p].
    """
    where = ours.logits.device
    size = sums.ranks(ours.group)[1]
    name = (key, ours.first, ours.width, theirs.width, str(where))
    if name not in projection.prepared:
        students, teachers, weights = entries(projection)
        reached = torch.zeros(theirs.width, dtype=torch.bool)
        inside = (teachers >= theirs.first) & (teachers < theirs.first + theirs.width)
        reached[teachers[inside] - theirs.first] = True
        mine = (students >= ours.first) & (students < ours.first + ours.width)
        places = torch.stack([teachers[mine], students[mine] - ours.first])
        shape = (theirs.width * size, ours.width)
        with torch.sparse.check_sparse_tensor_invariants(True):
            matrix = torch.sparse_coo_tensor(places, weights[mine], shape).coalesce()
        projection.prepared[name] = matrix.to(where), reached.to(where)
    found: tuple[Tensor, Tensor] = projection.prepared[name]
    return found


@dataclass(frozen=True)
class Teacher:
    """One teacher of a batch.

    Attributes:
        logits, alignment, projection, kind: as `span_losses` takes them. `Projection.identity` is that of a
            teacher with the student's tokenizer.
        weight: of the mean over its spans in the sum over teachers.
    """

    logits: Tensor
    alignment: Alignment
    projection: Projection
    kind: Kind = "p-kl"
    weight: float = 1.0


def teachers_loss(
    student: Tensor, teachers: Sequence[Teacher], **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Return the weighted sum of the teachers' mean losses per span, and each mean.

    Args:
        options: those of `span_losses`. A teacher without a span adds nothing.
    """
    means = []
    for one in teachers:
        losses = span_losses(student, one.logits, one.alignment, one.projection, one.kind, **options)
        means.append(losses.sum() / max(1, len(losses)))
    weighted = [one.weight * mean for one, mean in zip(teachers, means)]
    return torch.stack(weighted).sum(), means
