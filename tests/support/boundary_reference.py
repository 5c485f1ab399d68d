"""Reference for the rows of each lane and rank, by plain concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import sample_shares


def runs_of(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs (first position, rows) of ascending positions."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][0] + found[-1][1] == position:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((position, 1))
    return tuple(found)


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


def packed(bounds: Sequence[int], cp: int, rank: int) -> list[int]:
    """Positions of a context rank of packed documents, document by document."""
    return [int(b + p) for b, e in pairwise(bounds) for p in zigzag(e - b, cp, rank)]


def rows_given(source: Layout, image: np.ndarray) -> dict[int, np.ndarray]:
    """Row numbers that each last-stage rank has; image: [samples, length], positions with rows."""
    ends = np.cumsum([0, *image.sum(1)])
    found = {}
    for mine, ranks in zip(sample_shares(len(image), source.dp), source.lanes(source.pp - 1), strict=True):
        rows = np.arange(ends[mine[0]], ends[mine[-1] + 1])
        media = [n for sample in mine for n in media_of(source, int(image[sample].sum()))]
        for c in range(source.cp):
            part = rows[of_context(source, media, c)]
            parts = np.split(part, source.tp) if source.sequence_parallel else [part] * source.tp
            found |= dict(zip(ranks[c * source.tp : (c + 1) * source.tp], parts, strict=True))
    return found


def rows_wanted(
    layout: Layout, image: np.ndarray, documents: Sequence[Sequence[int]] = ()
) -> dict[int, list[int]]:
    """Row numbers that each first-stage rank must have, sample by sample, position by position."""
    number = np.where(image, image.cumsum().reshape(image.shape) - 1, -1)
    found = {}
    for samples, ranks in zip(sample_shares(len(image), layout.dp), layout.lanes(0), strict=True):
        for index, rank in enumerate(ranks):
            c, t = divmod(index, layout.tp)
            found[rank] = []
            for s in samples:
                mine = packed(documents[s] if documents else (0, image.shape[1]), layout.cp, c)
                if layout.sequence_parallel:
                    mine = np.array_split(mine, layout.tp)[t].tolist()
                found[rank] += [int(number[s, p]) for p in mine if image[s, p]]
    return found
