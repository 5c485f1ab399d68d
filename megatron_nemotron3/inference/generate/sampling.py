"""Logits to probabilities to a token: greedy, temperature, top-k, top-p (nucleus, arXiv 1904.09751).

Also the acceptance rule of speculative decoding (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the default is greedy.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep only that many most likely tokens; None keeps all.
        top_p: keep only the fewest most likely tokens whose probabilities, after top_k, add up to it; None or
            1.0 keeps all.
        seed: row i draws with seed + i.

    Raises:
        ValueError: a temperature below 0, a top_k below 1, a top_p not in (0, 1], a seed above 2^62.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: use 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: use 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: use a number above 0 and up to 1")
        if abs(self.seed) > 1 << 62:
            raise ValueError(f"seed={self.seed}: use a number of at most 2^62")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Distribution a token is drawn from: logits [..., vocabulary] -> the same shape in FP32.

    Greedy sampling gives a single 1. Where top_k cuts between equal logits, all of them stay.
    """
    logits = logits.float()
    if sampling.greedy:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    found = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = found.sort(dim=-1, descending=True, stable=True)
        # A token stays if those before it do not reach top_p; the first one always does.
        before = ordered.double().cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        found = torch.zeros_like(found).scatter_(-1, index, ordered)
        found = found / found.sum(-1, keepdim=True)
    return found


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw the token at which the running sum of probabilities exceeds `uniform` times their total."""
    running = probabilities.double().cumsum(-1)
    total = running[..., -1:]
    # Rounding must not reach the total, because the last token may have probability 0.
    point = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, point, right=True).squeeze(-1)


class Sampler:
    """Draws tokens. A row's random numbers depend only on the seed and its index, not on the other rows."""

    def __init__(self, sampling: Sampling, rows: Sequence[int]) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(sampling.seed + row) for row in rows]

    def select(self, rows: Sequence[int]) -> Sampler:
        """Return a sampler of some of the rows; it shares their generators."""
        result = Sampler(self.sampling, ())
        result.generators = [self.generators[row] for row in rows]
        return result

    def uniform(self, count: int) -> Tensor:
        """Random numbers [b, count] in [0, 1), FP64, on the host."""
        numbers = [torch.rand(count, generator=g, dtype=torch.float64) for g in self.generators]
        return torch.stack(numbers)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [b, vocabulary] -> tokens [b]."""
        if self.sampling.greedy:
            return logits.argmax(-1)
        return draw(
            probabilities(logits, self.sampling), self.uniform(1).to(logits.device, non_blocking=True)[:, 0]
        )


def accept(
    p: Tensor, q: Tensor, drafted: Tensor, limits: Tensor, to_accept: Tensor, to_draw: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept drafts so that tokens have the distribution p (arXiv 2211.17192, algorithm 1).

    A draft is accepted with probability min(1, p / q), where q is MTP's probability of it; a rejected one is
    replaced by a token drawn from the positive part of p - q.
    """
    k, index = drafted.shape[1], drafted.unsqueeze(-1)
    agreed = to_accept * q.gather(-1, index).squeeze(-1) < p[:, :k].gather(-1, index).squeeze(-1)
    within = torch.arange(k, device=p.device) < limits.unsqueeze(1)
    accepted = (agreed & within).long().cumprod(1).sum(1)  # those before the first rejected one
    rows = torch.arange(len(p), device=p.device)
    own = p[rows, accepted]
    if k:
        left = (own - q[rows, accepted.clamp(max=k - 1)]).clamp_min_(0)
        # Nothing is left where p and q differ only by rounding.
        rejected = (accepted < limits) & (left.sum(-1) > 0)
        own = torch.where(rejected.unsqueeze(1), left, own)
    return accepted, draw(own, to_draw)
