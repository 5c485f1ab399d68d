"""Which experts each token takes, on both sides: near ties, and what is no tie.

Two correct implementations differ in the last bits of a score. Where the last chosen and the best rejected
expert are closer than that, they may choose differently, and the token's output then differs by a whole
expert. So scores are compared, and a token whose choice is a near tie takes Hugging Face's experts on both
sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Scores [0, 1] closer than this may change places. On equal inputs the two sides' scores differ by about
#: 1e-6; streams that have run through many layers differ by more.
TIE = 1e-4


@dataclass(frozen=True)
class Selection:
    """What a router decided for s tokens."""

    #: Score of every expert with its bias, which is what experts are chosen by [s, experts].
    scores: Tensor
    #: The chosen experts, in any order [s, topk].
    experts: Tensor


@dataclass(frozen=True)
class Agreement:
    """How a selection compares with another one of the same tokens."""

    #: Largest difference of a score.
    scores: float
    #: Tokens that chose others where the scores are a near tie.
    ties: int
    #: Tokens that chose others without one.
    others: int


def agree(ours: Selection, theirs: Selection) -> tuple[Tensor, Agreement]:
    """The experts to compute with [s, topk]: ours, and theirs for tokens with a near tie.

    Raises:
        ValueError: the two choose different numbers of experts, or among different numbers.
    """
    for what, shape, other in (
        ("experts", ours.scores.shape, theirs.scores.shape),
        ("experts a token", ours.experts.shape, theirs.experts.shape),
    ):
        if shape != other:
            raise ValueError(f"Megatron's router has {shape[1]} {what}, Hugging Face's has {other[1]}")
    chosen, expected = (torch.zeros_like(ours.scores).scatter(1, s.experts, 1.0) for s in (ours, theirs))
    differ = (chosen != expected).any(1)
    ranked = ours.scores.gather(1, ours.experts).amin(1)
    # How far the best of their experts that are not ours is from the last of ours, in our own scores.
    missed = ours.scores.masked_fill(~((expected > 0) & (chosen == 0)), torch.inf).amin(1)
    tie = differ & (ranked - missed <= TIE)
    experts = torch.where(tie.unsqueeze(1), theirs.experts, ours.experts)
    difference = (ours.scores - theirs.scores).abs().max().item()
    return experts, Agreement(difference, int(tie.sum()), int((differ & ~tie).sum()))
