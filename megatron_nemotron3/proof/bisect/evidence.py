"""What a system recorded at one place, and how far it lies from what the checkpoint computes there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_nemotron3.proof.bisect.causes import Cause
from megatron_nemotron3.proof.bisect.findings import CauseExplanation

#: Quantiles by which differences are compared with noise.
QUANTILES = (0.5, 0.75, 0.9, 0.97, 1.0)
#: Least noise of a log-probability: four units in the last place of one of size 8, in FP32.
LEAST = 2e-6
#: A token stands out if it differs by this many times the noise.
STANDS_OUT = 5.0
#: What a cause leaves is at most this many times noise; where a tenth of the differences is left or less,
#: so many, because rounding grows with the numbers of a layer that is wrong.
LEFT, GROWN = 3.0, 20.0
#: The differences that a cause leaves must be at most this share of those without it.
EXPLAINS = 0.5
#: Where this share is left or less, rounding grew with the numbers, or a weight is kept in BF16, whatever
#: noise is.
NOTHING = 2e-2
#: Where this share is left or less, a cause that is in single layers need not be looked for.
ROUNDED = 0.1
#: What a cause leaves that needs no better one, in units of noise.
ENOUGH = 1.5
#: Of a cause that rounds, whatever noise is: two systems with it round some numbers differently, and how many
#: depends on the order of sums, that is, on the CPU (the residual stream in BF16: 0.1 to 0.17).
OTHERWISE_ROUNDED = 0.25
#: Causes whose rest is at most this many times the smallest one explain a system as well.
ALIKE = 1.25
#: The share of tokens that a change of a quantity may leave as they are.
FEW = 4e-3

#: A cause, the layers it is in, and what the checkpoint computes with it at the place.
Trial = tuple[Cause, tuple[int, ...], Sequence[Tensor]]


class Evidence:
    """Log-probabilities or hidden states of several sequences, recorded and recomputed.

    Args:
        places: of each of them, the sequence and the token of the first entry.
        found: recorded, [n] log-probabilities or [n, d] hidden states each.
        plain: the same from the checkpoint.
        draws: several times the same with rounding.
    """

    def __init__(
        self,
        places: Sequence[tuple[int, int]],
        found: Sequence[Tensor],
        plain: Sequence[Tensor],
        draws: Iterable[Sequence[Tensor]],
    ) -> None:
        self.places, self.found, self.plain = places, [one.float() for one in found], plain
        rounded = [_apart(one, plain) for one in draws]
        self._usual = [torch.stack(each).amax(0) for each in zip(*rounded, strict=True)]
        least = LEAST if found[0].dim() == 1 else 1e-7
        self.noise = torch.stack([quantiles(torch.cat(one)) for one in rounded]).amax(0).clamp_min(least)

    @property
    def finite(self) -> bool:
        return all(bool(one.isfinite().all()) for one in self.found)

    def differences(self, rows: Sequence[Tensor] | None = None) -> Tensor:
        """Of all recorded entries, one per token, from the checkpoint's or others."""
        return torch.cat(_apart(self.found, self.plain if rows is None else rows))

    def _ratios(self, rows: Sequence[Tensor] | None) -> Tensor:
        return quantiles(self.differences(rows)) / self.noise

    def distance(self, rows: Sequence[Tensor] | None = None) -> float:
        """The largest quantile over that of noise; the last, often one token's, counts half."""
        ratios = self._ratios(rows)
        ratios[-1] *= 0.5
        return float(ratios.max())

    def size(self, rows: Sequence[Tensor] | None = None) -> float:
        """How large the differences are as a whole, in units of noise."""
        return float(self._ratios(rows)[:4].mean())

    def outside(self) -> list[Tensor]:
        apart = _apart(self.found, self.plain)
        limits = [STANDS_OUT * torch.maximum(usual, self.noise[1]) for usual in self._usual]
        return [one > limit for one, limit in zip(apart, limits, strict=True)]

    def position(self) -> tuple[int, int] | None:
        for (sequence, first), outside in zip(self.places, self.outside(), strict=True):
            if outside.any():
                return sequence, first + int(outside.nonzero()[0])
        return None

    def rest(self, cause: Cause, rows: Sequence[Tensor]) -> float:
        """Distance from what the checkpoint computes with a cause, if that shows another fault, else 0."""
        before, after, distance = self.size(), self.size(rows), self.distance(rows)
        enough = EXPLAINS if cause.rounds else 0.0
        alone = distance <= LEFT or explains(cause, distance, after, before) or after <= enough * before
        return distance if self.finite and not alone else 0.0

    def everywhere(self, cause: Cause, rows: Sequence[Tensor]) -> bool:
        """Whether a cause leaves no token as wrong as it is, but for those whose router is in doubt."""
        limits = torch.cat([STANDS_OUT * torch.maximum(one, self.noise[1]) for one in self._usual])
        before, after = self.differences(), self.differences(rows)
        wrong = (after > limits) & (after > ROUNDED * before)
        return cause.rounds or int(wrong.sum()) <= FEW * len(wrong)

    def explained(self, trials: Iterable[Trial]) -> list[tuple[float, CauseExplanation]]:
        """The trials that leave noise, with what they leave; none where an entry is no number."""
        before, result = self.size(), []
        for cause, layers, rows in trials if self.finite else ():
            after = self.size(rows)
            if explains(cause, self.distance(rows), after, before):
                result.append((after, CauseExplanation(cause.name, layers, before, after)))
        return result


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """Distance of each token; what is not a number is infinitely far."""
    pairs = [(a - b).detach() for a, b in zip(one, other, strict=True)]
    apart = [d.abs() if d.dim() == 1 else d.norm(dim=-1) for d in pairs]
    return [d.nan_to_num(nan=torch.inf, posinf=torch.inf) for d in apart]


def quantiles(differences: Tensor) -> Tensor:
    """`QUANTILES` of differences, zeros of none."""
    ordered = differences.sort().values
    if not len(ordered):
        return torch.zeros(len(QUANTILES))
    return torch.stack([ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES])


def explains(cause: Cause, distance: float, after: float, before: float) -> bool:
    """Whether what a cause leaves is noise; where numbers grow, or the cause rounds, that is more."""
    if not math.isfinite(after):
        return False
    if cause.rounds and after <= OTHERWISE_ROUNDED * before:
        return True
    if after <= ROUNDED * before:
        return distance <= GROWN or after <= NOTHING * before
    return distance <= LEFT and after <= EXPLAINS * before


def best(found: Sequence[tuple[float, CauseExplanation]]) -> list[CauseExplanation]:
    """The explanation with the smallest rest, and those with about the same."""
    ordered = sorted(found, key=lambda pair: pair[0])
    return [one for after, one in ordered if after <= ALIKE * ordered[0][0] + 0.05]
