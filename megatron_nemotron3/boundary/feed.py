"""Row counts that come with the batch, so that the ranks at a boundary need not exchange them.

Every boundary rank, of encoders and of the language model, must describe the same global microbatch: all
samples of all data lanes. Which samples a lane takes is `partition.sample_shares`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import Runs, rows_of
from megatron_nemotron3.boundary.plan import TransferPlan, make_plan, slices_of


@dataclass(frozen=True)
class Microbatch:
    """Description of a microbatch that is known before its rows arrive. Hashable, the same on every rank.

    rows: encoder -> number of rows of each sample, over all lanes.
    runs: encoder -> positions of each sample's rows; needed if the language model uses CP or SP.
    lengths: length of each sample's sequence, padding included; given with runs.
    documents: for each sample, `cu_seqlens_padded` if it is packed, else (); empty, or given with runs.
    media: encoder -> for each sample, the rows of each medium (picture, clip), in order; needed of an encoder
        with CP above 1 if a sample has several media.
    """

    rows: tuple[tuple[str, tuple[int, ...]], ...]
    runs: tuple[tuple[str, tuple[Runs, ...]], ...] = ()
    lengths: tuple[int, ...] = ()
    documents: tuple[tuple[int, ...], ...] = ()
    media: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()

    @classmethod
    def of(
        cls,
        rows: Mapping[str, Sequence[int]] | None = None,
        *,
        runs: Mapping[str, Sequence[Runs]] | None = None,
        lengths: Sequence[int] = (),
        documents: Sequence[Sequence[int]] = (),
        media: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> Microbatch:
        """Make a description from mappings; `rows` of an encoder with runs or media may be left out."""
        runs, media = runs or {}, media or {}
        by_media = {name: [sum(sample) for sample in samples] for name, samples in media.items()}
        by_runs = {name: [rows_of(sample) for sample in samples] for name, samples in runs.items()}
        counted: dict[str, Sequence[int]] = {**by_media, **by_runs, **(rows or {})}
        for name, counts in by_media.items():
            if counts != (positions := list(counted[name])):
                raise ValueError(
                    f"{name}: media of {counts[:20]} rows for samples with {positions[:20]} positions: give "
                    "the rows of every medium"
                )
        return cls(
            tuple(sorted((name, tuple(map(int, n))) for name, n in counted.items())),
            tuple(sorted((name, tuple(samples)) for name, samples in runs.items())),
            tuple(map(int, lengths)),
            _integers(documents),
            tuple(sorted((name, _integers(samples)) for name, samples in media.items())),
        )

    def rows_of(self, name: str) -> tuple[int, ...]:
        return dict(self.rows)[name]

    def runs_of(self, name: str) -> tuple[Runs, ...] | None:
        """Positions of each sample's rows, or None if not known."""
        return dict(self.runs).get(name)

    def media_of(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Rows of each medium of each sample; if not known, the rows of a sample are one medium."""
        known = dict(self.media).get(name)
        return tuple((n,) if n else () for n in self.rows_of(name)) if known is None else known

    def plan(
        self, name: str, source: Layout, destination: Layout, counts: Sequence[int], row_bytes: int
    ) -> TransferPlan:
        """The plan of one encoder's rows; ranks want whole lanes if positions are not known."""
        runs, slices = self.runs_of(name), None
        if runs is not None and destination.sliced:
            slices = slices_of(destination, runs, self.lengths, self.documents)
        media = self.media_of(name)
        return make_plan(source, destination, counts, row_bytes=row_bytes, slices=slices, media=media)


def _integers(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in rows)


#: batch -> its description.
Describe = Callable[[Any], Microbatch]


class RowFeed(Iterator[Any]):
    """Iterator over batches, for Megatron's schedule, whose descriptions are available ahead of the batches.

    describe: makes the description of a batch. It should read CPU tensors only, because the host waits for a
        tensor on a GPU.
    consumed: whether this rank's forward step takes the batches. If not (a pipeline stage in the middle of
        its module), they are dropped after they are described.
    """

    #: Number of newest descriptions that are kept; larger than any pipeline depth.
    KEPT = 1024

    def __init__(self, batches: Iterable[Any], describe: Describe, consumed: bool = True) -> None:
        self._batches = iter(batches)
        self._describe = describe
        self._consumed = consumed
        self._ahead: deque[Any] = deque()
        self._known: dict[int, Microbatch] = {}
        self._read = self._drawn = 0

    def __next__(self) -> Any:
        if self._drawn == self._read:
            self._advance()
        self._drawn += 1
        return self._ahead.popleft() if self._consumed else None

    @property
    def current(self) -> Microbatch:
        """Description of the batch that `next` returned last; KeyError before the first."""
        return self._known[self._drawn - 1]

    def at(self, number: int) -> Microbatch:
        """Description of the batch with this number, counted from 0; KeyError if it was dropped (KEPT)."""
        while self._read <= number:
            self._advance()
        return self._known[number]

    def _advance(self) -> None:
        batch = next(self._batches)
        self._known[self._read] = self._describe(batch)
        self._known.pop(self._read - self.KEPT, None)
        self._read += 1
        if self._consumed:
            self._ahead.append(batch)


class FeedStream:
    """Descriptions of a feed's microbatches in the order of their exchange; None without a feed."""

    def __init__(self, feed: RowFeed | None = None) -> None:
        self.feed = feed
        self.exchanged = 0

    def next(self) -> Microbatch | None:
        self.exchanged += 1
        return None if self.feed is None else self.feed.at(self.exchanged - 1)


def tokens(
    key: str, special: Mapping[str, int], documents: str | None = None, media: str | None = None
) -> Describe:
    """Make a `describe` for batches that are mappings with the global microbatch's token ids.

    Args:
        key: key of the ids [samples, length] (int tensor on the CPU, or an array).
        special: encoder -> token id that marks the positions of its rows (`special_token_ids` of MIMO).
        documents: key of every sample's `cu_seqlens_padded`, for packed sequences.
        media: key of `Microbatch.media` as a mapping, for encoders with CP above 1.
    """

    def describe(batch: Mapping[str, Any]) -> Microbatch:
        cuts = batch[documents] if documents is not None else ()
        return describe_ids(batch[key], special, cuts, batch[media] if media is not None else None)

    return describe


def describe_ids(
    ids: Any,
    special: Mapping[str, int],
    documents: Sequence[Sequence[int]] = (),
    media: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Microbatch:
    """Describe a global microbatch by its token ids [samples, length]."""
    array = ids.numpy() if isinstance(ids, torch.Tensor) else ids
    runs = {name: [_runs_of_mask(sample == token) for sample in array] for name, token in special.items()}
    return Microbatch.of(runs=runs, lengths=[array.shape[1]] * len(array), documents=documents, media=media)


def _runs_of_mask(mask: Any) -> Runs:
    edges = np.diff(mask.astype(np.int8), prepend=0, append=0)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return tuple(zip(starts.tolist(), (stops - starts).tolist(), strict=True))
