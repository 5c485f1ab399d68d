"""Logits -> probabilities -> a token. Greedy, temperature, top-k, top-p (nucleus, arXiv 1904.09751)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the default is greedy.

    Args:
        temperature: logits are divided by it; 0: the most likely token.
        top_k: only that many most likely tokens; None: all.
        top_p: only the fewest most likely tokens whose probabilities, after top_k, add up to it; None or 1.0:
            all.
        seed: of row i seed + i.

    Raises:
        ValueError: a temperature below 0, a top_k below 1, a top_p not in (0, 1].
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

    @property
    def greedy(self) -> bool:
        """Whether there is no chance in it."""
        return self.temperature == 0 or self.top_k == 1


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn from: logits [..., vocabulary] -> the same shape in FP32; greedy: one 1.

    Where top_k cuts between equal logits, all of them stay.
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
    """The token where the running sum of probabilities passes `uniform` times their total.

    Args:
        probabilities: [..., vocabulary], not negative; they need not add up to 1.
        uniform: [...], in [0, 1), FP64.

    Returns:
        [...] ids, none of probability 0.
    """
    running = probabilities.double().cumsum(-1)
    total = running[..., -1:]
    # Rounding must not reach the total: the last token may have probability 0.
    point = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, point, right=True).squeeze(-1)


class Sampler:
    """Draws tokens; a row's numbers depend on the seed and its place only, not on the rows beside it.

    Args:
        rows: places of the rows, for their seeds.
    """

    def __init__(self, sampling: Sampling, rows: Sequence[int]) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(sampling.seed + row) for row in rows]

    def select(self, rows: Sequence[int]) -> Sampler:
        """The sampler of some of its rows; their generators are shared."""
        result = Sampler(self.sampling, ())
        result.generators = [self.generators[row] for row in rows]
        return result

    def uniform(self, device: torch.device) -> Tensor:
        """One number in [0, 1) for each row [b], FP64."""
        numbers = [torch.rand(1, generator=g, dtype=torch.float64) for g in self.generators]
        return torch.cat(numbers).to(device)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [b, vocabulary] -> tokens [b]."""
        if self.sampling.greedy:
            return logits.argmax(-1)
        return draw(probabilities(logits, self.sampling), self.uniform(logits.device))
