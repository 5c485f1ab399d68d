"""Decoding as its definition says: one pass over the whole text per token, one row, no state kept."""

from __future__ import annotations

import itertools
import math

import torch

from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.sampling import Sampling


def naive_continuation(
    engine: Engine, prompt: list[int], new: int, sampling: Sampling | None = None, row: int = 0
) -> list[int]:
    """Continue one prompt by `new` tokens.

    Shares with `generate` only `Engine.forward` over an empty state, which other tests compare with Megatron
    and transformers, and the definition of random numbers: row i draws one FP64 number per token from a
    generator seeded with seed + i.

    Args:
        sampling: default: greedy.
        row: index of the row in the batch, for its seed.
    """
    numbers = torch.Generator().manual_seed((sampling.seed if sampling else 0) + row)
    ids = list(prompt)
    for _ in range(new):
        logits = engine.forward(torch.tensor([ids]), engine.new_state(1)).logits
        last = logits[0, -1].tolist()
        if sampling is None:
            ids.append(last.index(max(last)))
        else:
            ids.append(_drawn(last, sampling, torch.rand(1, generator=numbers, dtype=torch.float64).item()))
    return ids[len(prompt) :]


def _drawn(logits: list[float], sampling: Sampling, uniform: float) -> int:
    """The token at which the running sum of kept weights, in the order of ids, exceeds `uniform` of them."""
    largest = max(logits)
    weights = {i: math.exp((x - largest) / sampling.temperature) for i, x in enumerate(logits)}
    kept = sorted(weights, key=lambda i: -weights[i])[: sampling.top_k]
    if sampling.top_p is not None:
        sums = list(itertools.accumulate(weights[i] for i in kept))
        enough = next(count for count, total in enumerate(sums, 1) if total >= sampling.top_p * sums[-1])
        kept = kept[:enough]
    point, running = uniform * sum(weights[i] for i in kept), 0.0
    for i in sorted(kept):
        running += weights[i]
        if running > point:
            return i
    raise AssertionError("uniform is not below 1")
