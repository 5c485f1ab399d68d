"""Row counts come with the batch: both sides of a boundary know them, so nobody asks.

`RowFeed` wraps the data iterator that Megatron's schedule is given. The communicator asks it for the
description of a microbatch before its rows arrive; the forward step then gets the same batch.

    feed = RowFeed(iterator, tokens("input_ids", {"images": IMAGE_TOKEN, "audio": AUDIO_TOKEN}))
    communicator.feed = feed
    pretrain(..., data_iterator=feed)

Every boundary rank, of encoders and of the language model, must describe the same global microbatch: all
samples of all data lanes. Which samples a lane takes is `samples.contiguous`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_nemotron3.boundary.partition import Runs, rows_of


@dataclass(frozen=True)
class Microbatch:
    """What is known of a microbatch before its rows arrive. Hashable, the same on every rank.

    rows: encoder -> rows of each sample, over all lanes.
    runs: encoder -> where each sample's rows stand; needed where the language model owns slices (CP, SP).
    lengths: of each sample's sequence, padding included; with runs.
    documents: of each sample, `cu_seqlens_padded` if it is packed, else (); with runs, or none at all.
    """

    rows: tuple[tuple[str, tuple[int, ...]], ...]
    runs: tuple[tuple[str, tuple[Runs, ...]], ...] = ()
    lengths: tuple[int, ...] = ()
    documents: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls,
        rows: Mapping[str, Sequence[int]] | None = None,
        *,
        runs: Mapping[str, Sequence[Runs]] | None = None,
        lengths: Sequence[int] = (),
        documents: Sequence[Sequence[int]] = (),
    ) -> Microbatch:
        """From mappings; `rows` of an encoder with runs may be left out."""
        counted = {name: [rows_of(sample) for sample in samples] for name, samples in (runs or {}).items()}
        return cls(
            tuple(sorted((name, tuple(map(int, n))) for name, n in {**counted, **(rows or {})}.items())),
            tuple(sorted((name, tuple(samples)) for name, samples in (runs or {}).items())),
            tuple(map(int, lengths)),
            tuple(tuple(map(int, cuts)) for cuts in documents),
        )

    def rows_of(self, name: str) -> tuple[int, ...]:
        """Rows of each sample from one encoder.

        Raises:
            KeyError: there is no such encoder.
        """
        return dict(self.rows)[name]

    def runs_of(self, name: str) -> tuple[Runs, ...] | None:
        """Where they stand, if it is known."""
        return dict(self.runs).get(name)


#: batch -> its description.
Describe = Callable[[Any], Microbatch]


class RowFeed(Iterator[Any]):
    """An iterator over batches whose descriptions can be had before.

    Args:
        batches: any iterator of batches.
        describe: from a batch of `batches`. It should read what is on the CPU: a tensor on a GPU makes the
            host wait.
        consumed: whether this rank's forward step takes the batches. If not (a pipeline stage in the middle
            of its module), they are dropped once they are described.
    """

    #: Descriptions that are kept behind the newest: more than any pipeline is deep.
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
        """The description of the batch that `next` gave last.

        Raises:
            KeyError: it has given none.
        """
        return self._known[self._drawn - 1]

    def at(self, number: int) -> Microbatch:
        """The description of the batch with this number, from 0 on; reads ahead if need be.

        Raises:
            StopIteration: there are not so many batches.
            KeyError: it was forgotten (KEPT).
        """
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


class Stream:
    """Microbatches of a feed, in the order in which they cross a boundary."""

    def __init__(self, feed: RowFeed | None = None) -> None:
        self.feed = feed
        self.crossed = 0

    def next(self) -> Microbatch | None:
        """The description of the next one; None without a feed.

        Raises:
            Exception: whatever the batches or their description raise; StopIteration behind the last.
        """
        self.crossed += 1
        return None if self.feed is None else self.feed.at(self.crossed - 1)


def tokens(key: str, special: Mapping[str, int], documents: str | None = None) -> Describe:
    """A `describe` for batches that are mappings with the global microbatch's token ids.

    Args:
        key: of the ids [samples, length] (int tensor on the CPU, or an array).
        special: encoder -> the token id in whose place its rows stand (`special_token_ids` of MIMO).
        documents: key of every sample's `cu_seqlens_padded`, for packed sequences.
    """

    def describe(batch: Mapping[str, Any]) -> Microbatch:
        cuts = batch[documents] if documents is not None else ()
        return describe_ids(batch[key], special, cuts)

    return describe


def describe_ids(ids: Any, special: Mapping[str, int], documents: Sequence[Sequence[int]] = ()) -> Microbatch:
    """The description of a global microbatch, from its token ids [samples, length]."""
    array = ids.numpy() if isinstance(ids, torch.Tensor) else ids
    runs = {name: [_runs(sample == token) for sample in array] for name, token in special.items()}
    return Microbatch.of(runs=runs, lengths=[array.shape[1]] * len(array), documents=documents)


def _runs(mask: Any) -> Runs:
    """Runs of ones in an array of booleans [length]."""
    edges = np.diff(mask.astype(np.int8), prepend=0, append=0)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return tuple(zip(starts.tolist(), (stops - starts).tolist(), strict=True))
