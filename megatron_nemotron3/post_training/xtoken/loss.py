"""P-KL and H-KL: how far the student's distribution of a span is from a teacher's with another vocabulary.

n, m: positions of the student and of the teacher on a context-parallel rank; v, u: their vocabularies,
padded; p: tensor-parallel ranks, which share these; r: spans of one of the ranks that share the positions.
docs/post_training.md has the formulas and their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from megatron_nemotron3.post_training.xtoken.align import Alignment
from megatron_nemotron3.train.teacher.projection import COMMON, Projection

Kind = Literal["p-kl", "h-kl"]
#: Probability of a teacher's token that no token of the student stands for.
FLOOR = 1e-10
#: Probabilities of unpaired tokens that H-KL compares.
UNPAIRED = 8192


@dataclass(frozen=True)
class SpanLoss:
    """Which loss of a span is computed.

    Attributes:
        kind: "p-kl" projects the student's probabilities into the teacher's vocabulary; "h-kl" compares the
            tokens that the projection pairs, and the sorted probabilities of the others.
        temperature: divides both logits. The factor of its square is the caller's.
        threshold: least weight of a pair of H-KL; 1 pairs only equal tokens, as GOLD does.

    Raises:
        ValueError: an unknown kind.
    """

    kind: Kind = "p-kl"
    temperature: float = 1.0
    threshold: float = COMMON

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind {self.kind!r}: give 'p-kl' or 'h-kl'")


class RankGroups(NamedTuple):
    """Process groups of the ranks that share a loss; None where each has the whole.

    tensor: shares both vocabularies. context: each rank has the alignment of its positions.
    """

    tensor: Any = None
    context: Any = None


def span_losses(
    student: Tensor,
    teacher: Tensor,
    alignment: Alignment,
    projection: Projection,
    loss: SpanLoss | None = None,
    groups: RankGroups | None = None,
) -> Tensor:
    """Compute the loss of each span in nats; the gradient goes to the student alone.

    Args:
        student: logits [..., v / p]; leading dimensions are those of `alignment.student`.
        teacher: logits [..., u / p]; leading dimensions are those of `alignment.teacher`.
        loss: None: P-KL.
        groups: None: this rank has everything.

    Returns:
        [spans], equal on all ranks of both groups. With a context group the sum of all ranks' losses is
        minimized.

    Raises:
        ValueError: shapes do not fit the alignment, or logits are fewer than the tokens of a vocabulary.
    """
    loss, groups = loss or SpanLoss(), groups or RankGroups()
    size = _size(groups.tensor)
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
    with torch.autocast(student.device.type, enabled=False):
        sizes = (projection.student_size, projection.teacher_size)
        ours, theirs = (
            _Side(logits, alignment, which, sizes[which], loss.temperature, groups)
            for which, logits in enumerate((student, teacher.detach()))
        )
        if loss.kind == "h-kl":
            losses = _h_kl(ours, theirs, projection, loss.threshold)
        else:
            losses = _p_kl(ours, theirs, projection)
        return _gathered(losses, groups.context, shared=True)[: alignment.spans]


class _Side:
    """Logits of one model on this rank, and the means of its positions over spans."""

    def __init__(
        self,
        logits: Tensor,
        alignment: Alignment,
        which: int,
        tokens: int,
        temperature: float,
        groups: RankGroups,
    ) -> None:
        self.group, self.context = groups
        self.width = logits.shape[-1]
        self.first = _rank(self.group) * self.width
        #: Which columns are tokens; the others pad the vocabulary.
        self.real = torch.arange(self.first, self.first + self.width, device=logits.device) < tokens
        #: [n, v / p], minus infinity where padded.
        self.logits = (logits.reshape(-1, self.width).float() / temperature).masked_fill(
            ~self.real, -torch.inf
        )
        ranks, ids = _size(self.context), (alignment.student, alignment.teacher)[which].flatten()
        #: Spans of all context ranks, made to divide among them; row `_spans` takes what is in no span.
        self._spans = -(-alignment.spans // ranks) * ranks
        self._ids = torch.where(ids < 0, self._spans, ids)
        sizes = torch.nn.functional.pad(alignment.sizes[which], (0, self._spans - alignment.spans), value=1)
        #: Positions of each of this rank's spans [r, 1].
        self._sizes = sizes.chunk(ranks)[_rank(self.context)][:, None]

    def log_softmax(self) -> Tensor:
        """Log-probabilities [n, v / p] over the whole vocabulary; 0 where padded."""
        shifted = self.logits - _largest(self.logits.amax(-1, keepdim=True), self.group)
        normalizer = _total(shifted.exp().sum(-1, keepdim=True), self.group, shared=True).log()
        return torch.where(self.real, shifted - normalizer, 0.0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean [r, …] of values by position [n, …]."""
        sums = values.new_zeros((self._spans + 1, values.shape[-1])).index_add(0, self._ids, values)
        return _scattered(sums[: self._spans], self.context) / self._sizes

    def mean_probabilities(self) -> Tensor:
        return self.mean(self.log_softmax().exp() * self.real)


def _p_kl(ours: _Side, theirs: _Side, projection: Projection) -> Tensor:
    matrix, reached, _ = _matrix(projection, ours, theirs)
    # [u / p, r]: the product is linear, so spans go through it rather than positions.
    ours_there = _scattered(matrix @ ours.mean_probabilities().T, ours.group).T
    target = theirs.mean(theirs.log_softmax())
    mass = _total(ours_there.sum(-1, keepdim=True), ours.group, shared=True)
    floor = torch.full((), FLOOR, device=ours_there.device).log()
    log = torch.where(reached, _positive(ours_there / _positive(mass)).log(), floor)
    terms = torch.where(theirs.real, target.exp() * (target - log), 0.0)
    return _total(terms.sum(-1), ours.group)


def _positive(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(torch.float32).tiny)


def _h_kl(ours: _Side, theirs: _Side, projection: Projection, threshold: float) -> Tensor:
    ours_mean, target = ours.mean(ours.log_softmax()), theirs.mean(theirs.log_softmax())
    matrix, paired, ours_paired = _matrix(projection, ours, theirs, threshold)
    # The student's log-probabilities in the places of the teacher's tokens.
    ours_there = _scattered(matrix @ ours_mean.T, ours.group).T
    apart = target.exp() * (target - ours_there)
    common = _total(torch.where(paired, apart, 0.0).sum(-1), ours.group)
    most = min(projection.student_size, projection.teacher_size) - len(projection.common(threshold)[0])
    if most == 0:
        return common
    rest = _sorted(ours_mean.exp() * (ours.real & ~ours_paired), min(most, UNPAIRED), ours.group)
    others = _sorted(target.exp() * (theirs.real & ~paired), min(most, UNPAIRED), ours.group)
    return common + (rest - others).abs().sum(-1)


def _sorted(values: Tensor, most: int, group: Any) -> Tensor:
    """The largest values [r, most] over all ranks, which have [r, v / p] each."""
    here = values.topk(min(most, values.shape[-1]), dim=-1).values
    return _gathered(here.T, group).T.topk(most, dim=-1).values


def _matrix(
    projection: Projection, ours: _Side, theirs: _Side, threshold: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sparse matrix [u, v / p] from this rank's part of the student's vocabulary to the teacher's."""
    name = (threshold, ours.first, ours.width, theirs.width, str(ours.logits.device))
    if name not in projection.prepared:
        if threshold is None:
            tokens, weights = torch.tensor(projection.tokens), torch.tensor(projection.weights)
            kept = weights > 0
            students, teachers, weights = kept.nonzero()[:, 0], tokens[kept].long(), weights[kept]
        else:
            students, teachers = map(torch.from_numpy, projection.common(threshold))
            weights = torch.ones(len(students))
        mine = (students >= ours.first) & (students < ours.first + ours.width)
        places = torch.stack([teachers[mine], students[mine] - ours.first])
        shape = (theirs.width * _size(ours.group), ours.width)
        reached, used = torch.zeros(shape[0], dtype=torch.bool), torch.zeros(shape[1], dtype=torch.bool)
        reached[teachers] = used[places[1]] = True
        with torch.sparse.check_sparse_tensor_invariants(True):
            matrix = torch.sparse_coo_tensor(places, weights[mine], shape).coalesce()
        here = reached[theirs.first : theirs.first + theirs.width]
        projection.prepared[name] = tuple(one.to(name[-1]) for one in (matrix, here, used))
    found: tuple[Tensor, Tensor, Tensor] = projection.prepared[name]
    return found


# Collectives with their gradients; `group` None is one rank. Megatron's sum in place: all callers give a
# tensor of their own that no gradient needs.


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _rank(group: Any) -> int:
    return 0 if group is None else int(group.rank())


def _total(part: Tensor, group: Any, *, shared: bool = False) -> Tensor:
    """Sum over ranks; `shared`: each uses it for a part of its own, so gradients are summed, too."""
    if _size(group) == 1:
        return part
    part = mappings.copy_to_tensor_model_parallel_region(part, group) if shared else part
    result: Tensor = mappings.reduce_from_tensor_model_parallel_region(part, group)
    return result


def _scattered(part: Tensor, group: Any) -> Tensor:
    """Sum [n, …] over ranks; each gets its share of the rows, [n / ranks, …]."""
    if _size(group) == 1:
        return part
    result: Tensor = mappings.reduce_scatter_to_sequence_parallel_region(part.contiguous(), group)
    return result


def _gathered(part: Tensor, group: Any, *, shared: bool = False) -> Tensor:
    """Concatenate [n, …] of all ranks; `shared`: each uses the whole for a part of its own."""
    if _size(group) == 1:
        return part
    result: Tensor = mappings.gather_from_sequence_parallel_region(part.contiguous(), shared, group)
    return result


def _largest(part: Tensor, group: Any) -> Tensor:
    """Element-wise maximum over ranks, without a gradient."""
    part = part.detach().clone()
    if _size(group) > 1:
        dist.all_reduce(part, dist.ReduceOp.MAX, group=group)
    return part
