"""Which experts each token selects on both sides, and which differences are near ties.

Two correct implementations differ in the last bits of a score. Where the last selected and the best rejected
expert are closer than that, they may select different experts, and the token's output then differs by a
whole expert. Therefore scores are compared, and a token whose selection is a near tie uses Hugging Face's
experts on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Scores in [0, 1] closer than this are a near tie. On equal inputs the scores of the two sides differ by
#: about 1e-6; after many layers they differ by more.
TIE = 1e-4


@dataclass(frozen=True)
class Selection:
    """Decision of a router for s tokens."""

    #: Score of every expert plus its bias, by which experts are selected [s, experts].
    scores: Tensor
    #: The selected experts, in any order [s, topk].
    experts: Tensor


@dataclass(frozen=True)
class SelectionDifference:
    """Difference between two selections for the same tokens."""

    #: Largest difference of a score.
    scores: float
    #: Tokens with other experts where the scores are a near tie.
    ties: int
    #: Tokens with other experts without a near tie.
    others: int


def agree(ours: Selection, theirs: Selection) -> tuple[Tensor, SelectionDifference]:
    """Return the experts to use [s, topk], ours but theirs at a near tie, and the difference."""
    for what, shape, other in (
        ("experts", ours.scores.shape, theirs.scores.shape),
        ("experts per token", ours.experts.shape, theirs.experts.shape),
    ):
        if shape != other:
            raise ValueError(f"Megatron's router has {shape[1]} {what}, Hugging Face's has {other[1]}")
    chosen, expected = (torch.zeros_like(ours.scores).scatter(1, s.experts, 1.0) for s in (ours, theirs))
    differ = (chosen != expected).any(1)
    ranked = ours.scores.gather(1, ours.experts).amin(1)
    # Distance of the best of their experts that we did not select from the last of ours, in our scores.
    missed = ours.scores.masked_fill(~((expected > 0) & (chosen == 0)), torch.inf).amin(1)
    tie = differ & (ranked - missed <= TIE)
    experts = torch.where(tie.unsqueeze(1), theirs.experts, ours.experts)
    difference = (ours.scores - theirs.scores).abs().max().item()
    return experts, SelectionDifference(difference, int(tie.sum()), int((differ & ~tie).sum()))
