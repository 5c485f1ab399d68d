"""Batches of the small omni model (`boundary_omni.py`): token ids with runs of special tokens, and inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.boundary.partition import sample_shares
from tests.support.boundary_omni import FEATURES, SPECIAL


def tokens(samples: int, length: int, seed: int) -> Tensor:
    """[samples, length]: ragged runs of both modalities; the first sample is all image, the last all text."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    ids = torch.randint(0, 200, (samples, length), generator=generator)
    for sample in range(samples - 1):
        start = number(0, length // 2)
        ids[sample, start : start + number(1, length // 2)] = SPECIAL["vision"]
        if sample % 2:
            ids[sample, length - number(1, length // 3) :] = SPECIAL["audio"]
    ids[0] = SPECIAL["vision"]
    return ids


def share(ids: Tensor, lane: int, lanes: int) -> Tensor:
    """[samples / lanes, length] of a lane."""
    mine = sample_shares(len(ids), lanes)[lane]
    return ids[mine.start : mine.stop]


def inputs(ids: Tensor, lane: int, lanes: int) -> dict[str, Any]:
    """`modality_inputs` of a lane; a modality that its samples lack is None."""
    found: dict[str, Any] = {}
    mine = sample_shares(len(ids), lanes)[lane]
    for number, (name, token) in enumerate(SPECIAL.items()):
        counts = (ids == token).sum(1)
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(int(counts.sum()), FEATURES, generator=generator)
        start, rows = int(counts[: mine.start].sum()), int(counts[mine.start : mine.stop].sum())
        found[name] = {"tiny": {"x": whole[start : start + rows]}} if rows else None
    return found
