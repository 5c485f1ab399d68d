"""The differences that `check_logits` found, their tolerances, and the printed report.

Three questions have three tolerances:

- Does each layer compute the same from the same input? The difference of its update to the residual stream,
  per token, relative to the update. Rounding in FP32 leaves about 1e-6; `LAYER` is above what the sums of the
  largest models can lose (16,384 terms: sqrt(16384) * 2^-24 = 8e-6) and below the effect of one expert, head
  or row in a wrong place. This is the strict check, and it names the layer.
- Are the routing scores the same? `SCORE`, absolute: scores are in [0, 1] before the bias.
- Do the logits agree, each side run from its own embedding? `LOGITS`, absolute, which suits logits of size 1
  and dozens of layers. How later layers amplify rounding depends on the weights. Therefore a third stream is
  perturbed after each layer by random noise of the size of the difference found in that layer. The resulting
  change of the logits is the floor; where `FLOORS` times the floor exceeds `LOGITS`, it is the tolerance.

Two correct implementations differ in the last bits of a score. Where the last selected and the best rejected
expert are closer than that, they may select different experts, and the token's output then differs by a
whole expert. Therefore scores are compared, and a token whose selection is a near tie uses Hugging Face's
experts on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LAYER = 1e-4
SCORE = 1e-5
LOGITS = 1e-4
FLOORS = 4.0
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


@dataclass(frozen=True)
class LayerComparison:
    """Comparison of one step: a layer, the embedding, or the input projection of an MTP block."""

    #: "layer 3 (*, decoder.layers.3 and backbone.layers.3)".
    name: str
    #: Largest difference of a token's update from the same input, relative to the update.
    difference: float
    #: Largest absolute difference of the two residual streams after it, and the stream's root mean square.
    streams: float
    scale: float
    #: Only for an E layer: largest difference of a score from the same input, tokens with a near tie, tokens
    #: with other experts without one (both in Megatron's own stream), experts that some token selected.
    scores: float | None = None
    ties: int = 0
    others: int = 0
    experts: int = 0

    @property
    def problem(self) -> str | None:
        """Description of a failure, or None. NaN is a failure."""
        if not self.difference <= LAYER:
            return f"{self.name}: the two differ by {self.difference:.1e} of the update (at most {LAYER:.0e})"
        if self.scores is not None and not self.scores <= SCORE:
            return f"{self.name}: routing scores differ by {self.scores:.1e} (at most {SCORE:.0e})"
        return None


@dataclass(frozen=True)
class Logits:
    """Comparison of one output: the model's own, or that of an MTP depth."""

    #: "logits", "logits of MTP depth 1".
    name: str
    #: Largest absolute difference, each side run from its own embedding.
    difference: float
    #: The same with the final norm and output layer of both sides applied to the same input.
    head: float
    #: Largest absolute change caused by noise of the size of the differences found in the layers.
    floor: float
    #: Standard deviation of the logits.
    scale: float
    tokens: int
    #: Tokens for which both sides have the same most likely next token.
    same_top1: int

    @property
    def tolerance(self) -> float:
        """`LOGITS`, or more where rounding explains more."""
        return max(LOGITS, FLOORS * self.floor + self.head)

    @property
    def problem(self) -> str | None:
        """Description of a failure, or None."""
        if not self.head <= LAYER * max(1.0, self.scale):
            return f"{self.name}: final norm and output layer differ by {self.head:.1e} on the same input"
        if not self.difference <= self.tolerance:
            return f"{self.name}: they differ by {self.difference:.1e} (at most {self.tolerance:.1e})"
        return None

    def __str__(self) -> str:
        return (
            f"{self.name}: difference {self.difference:.1e} of values of size {self.scale:.1f} "
            f"(at most {self.tolerance:.1e}; rounding explains {self.floor:.1e}), "
            f"same most likely token at {self.same_top1} of {self.tokens}"
        )


@dataclass
class LogitsReport:
    """All comparisons, in the order of the layers."""

    layers: list[LayerComparison] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    #: Routed experts of the model, MTP included. Those that some token selected are compared.
    experts: int = 0
    #: Peak memory of the process at the end, in bytes.
    peak_memory: int = 0

    @property
    def problems(self) -> list[str]:
        found = (*(layer.problem for layer in self.layers), *(logits.problem for logits in self.logits))
        return [problem for problem in found if problem]

    @property
    def passed(self) -> bool:
        return bool(self.logits) and not self.problems

    def lines(self) -> list[str]:
        worst = max(self.layers, key=lambda layer: layer.difference)
        result = [f"largest difference of a layer's output from the same input: {worst.difference:.1e}"]
        result[0] += f", {worst.name}"
        if self.experts:
            seen, ties = sum(layer.experts for layer in self.layers), sum(layer.ties for layer in self.layers)
            others = sum(layer.others for layer in self.layers)
            result.append(
                f"routing: {seen:,} of {self.experts:,} experts were chosen and compared; {ties} near ties, "
                f"{others} other choices"
            )
        result += [str(logits) for logits in self.logits]
        if len(self.logits) > 1:
            result.append(
                "MTP: transformers has none; its layers are joined by a second implementation, on HF's names"
            )
        result.append(f"peak memory {self.peak_memory / 2**30:.2f} GiB")
        result += [f"FAILED {problem}" for problem in self.problems]
        return [*result, "both sides compute the same"] if self.passed else result
