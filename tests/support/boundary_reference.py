"""Reference for the rows of each lane and rank, by plain concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import positions


def every_row(rows: Sequence[int], hidden: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Rows of every sample: [n, hidden] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, hidden, generator=generator).to(dtype) for n in rows]


def runs_of(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs (first position, rows) of ascending positions."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][0] + found[-1][1] == position:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((position, 1))
    return tuple(found)


def lane_of(layout: Layout, stage: int, rank: int) -> int | None:
    """The data lane of a rank of a stage; None if the rank is not in the stage."""
    return next((i for i, ranks in enumerate(layout.lanes(stage)) if rank in ranks), None)


def of_lane(samples: list[torch.Tensor], lanes: int, lane: int) -> torch.Tensor:
    """Rows of an equal share of the samples, one sample after the other."""
    share = len(samples) // lanes
    return torch.cat(samples[lane * share : (lane + 1) * share])


def of_rank(
    samples: list[torch.Tensor], marks: list[list[bool]], layout: Layout, lane: int, rank: int
) -> torch.Tensor:
    """Rows at the positions that a context- or sequence-parallel rank owns.

    Args:
        marks: of each sample, whether a position holds a row.
    """
    share = len(samples) // layout.dp
    at = layout.lanes(0)[lane].index(rank)
    found = []
    for sample in range(lane * share, (lane + 1) * share):
        mask = marks[sample]
        owned = positions(len(mask), layout.cp, layout.tp, sequence_parallel=layout.sequence_parallel)[at]
        mine = {p for start, stop in owned for p in range(start, stop)}
        places = [p for p, marked in enumerate(mask) if marked]
        found.append(samples[sample][[i for i, p in enumerate(places) if p in mine]])
    return torch.cat(found)


def zigzag(length: int, cp: int, rank: int) -> list[int]:
    """Positions of a context rank, by a second implementation."""
    if cp == 1:
        return list(range(length))
    chunks = np.arange(length).reshape(2 * cp, -1)
    return [*chunks[rank], *chunks[2 * cp - 1 - rank]]


def unit(source: Layout) -> int:
    """The rows of a medium are a multiple of this, so that they divide among the ranks of a source lane."""
    tp = source.tp if source.sequence_parallel else 1
    return tp if source.cp == 1 or source.share == "media" else 2 * source.cp * tp


def media_of(source: Layout, rows: int) -> list[int]:
    """Rows of up to three media of a sample."""
    first = rows // unit(source) // 4 * unit(source)
    return [n for n in (first, rows - 2 * first, first) if n]


def of_context(source: Layout, media: list[int], rank: int) -> np.ndarray:
    """Rows of a lane that a context rank of the source holds, by a second implementation."""
    total = sum(media)
    if source.cp == 1 or source.share == "contiguous":
        return np.arange(total).reshape(source.cp, -1)[rank]
    found, start = [], 0
    for n in media:
        if source.share == "zigzag":
            found.append(start + np.array(zigzag(n, source.cp, rank), int))
        elif int(Fraction(2 * start + n, 2 * total) * source.cp) == rank:
            found.append(start + np.arange(n))
        start += n
    return np.concatenate([np.arange(0), *found])
