"""Batches of conversations with media, for training.

    file = ChatFile(path, processor, config, seq_length=8192)
    check(file)
    lanes = {"language": (0, 2), "vision": (1, 4)}  # of this rank
    batches = build_loader(file, samples=4, lanes=lanes)

Tokens are computed once from the media's headers and cached, as for text (`train.data.packing`), so every
rank knows all rows of a microbatch and decodes only the media of its own encoders' lanes.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_nemotron3.boundary.feed import describe_ids
from megatron_nemotron3.boundary.partition import sample_shares
from megatron_nemotron3.common.files import open_outside
from megatron_nemotron3.common.processes import one_thread
from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.train.data.conversations import READING, Conversation, parse_line
from megatron_nemotron3.train.data.packing import PackedConversations, PackedRow, epoch_order, pack_arguments
from megatron_nemotron3.train.omni.conversation import ENCODER, OmniEncoder, WithMedia, join
from megatron_nemotron3.train.omni.layouts import LANGUAGE
from megatron_nemotron3.train.omni.media import MediaError

Batch = dict[str, Any]


@dataclass(frozen=True)
class ChatFile:
    """A file of conversations ({"messages": […]} a line), and how they become rows.

    Attributes:
        path: .jsonl file; paths of media are relative to its folder.
        processor: as of `load_processor`.
        seq_length: tokens of a row.
        pack: several conversations in a row, one row in a lane; else each has a row of its own.
        multiple: conversations are padded to a multiple of it, `2 * cp` with context parallelism.
        cache: folder of the tokens; None: `cache` in the file's folder.
    """

    path: str | os.PathLike[str]
    processor: Any
    config: OmniConfig
    seq_length: int
    pack: bool = True
    multiple: int = 1
    cache: str | None = None


def build_loader(
    file: ChatFile,
    *,
    samples: int,
    lanes: Mapping[str, tuple[int, int]],
    consumed_samples: int = 0,
    workers: int = 0,
    seed: int = 1234,
) -> Iterator[Batch]:
    """Make this rank's batches, without end; a batch depends on its number alone, an epoch has its own order.

    Args:
        samples: rows of a microbatch over all lanes: the micro-batch size times the language model's DP.
        lanes: module of this rank ("language", "vision", "sound") -> (its data lane, number of lanes). A lane
            has an equal, contiguous share of the samples. Media of a module that is left out are not decoded.
        consumed_samples: rows over all lanes that were used before.
        workers: processes that decode; 0: this one.

    Returns: batches with the keywords of `BoundaryMimoModel.forward`: input_ids, position_ids, labels and
        loss_mask [b, s] of the lane of "language", or else of the first module; modality_inputs;
        packing_kwargs if it is packed; and microbatch, all lanes' rows for a `RowFeed` (`describe`).

    Raises:
        ValueError: the samples do not divide among the lanes, or a lane of packed rows has more than one.
        MediaError: from the iterator: a medium cannot be decoded, or is not what the tokens were made for.
    """
    return batches(MediaRows(file, seed), samples, lanes, consumed_samples, workers)


class Samples(Protocol):
    """Samples by number, without end; `pack`: a sample is several conversations."""

    config: OmniConfig
    pack: bool

    def row(self, number: int) -> PackedRow: ...

    def media(self, number: int, modalities: tuple[str, ...]) -> list[Batch]:
        """`modality_inputs` of each of a sample's conversations."""


def batches(
    source: Samples, samples: int, lanes: Mapping[str, tuple[int, int]], consumed_samples: int, workers: int
) -> Iterator[Batch]:
    """Make this rank's batches of any samples, as `build_loader` does."""
    microbatches = Microbatches(source, samples, lanes)
    if consumed_samples % samples:
        raise ValueError(f"{consumed_samples} consumed samples are no multiple of {samples} of a microbatch")
    return _raised(in_order(microbatches, itertools.count(consumed_samples // samples), workers))


def describe(batch: Batch) -> Any:
    """Description of a batch's global microbatch, for a `RowFeed`."""
    return batch["microbatch"]


def check(file: ChatFile, *, decode: bool = True, workers: int = 0) -> str:
    """Read a whole file before training, the headers of all media, and with `decode` their contents.

    All ranks of the default process group, if there is one, call it and share the decoding.

    Returns: a line for the log: how full the rows are, and what is left out.

    Raises:
        ValueError: the first problem in the file, the same on every rank; a `MediaError` if it is a medium.
    """
    world = torch.distributed.is_initialized()
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if world else (0, 1)
    rows: MediaRows | None = None
    for first in (True, False):  # the others find the first rank's tokens, or make their own on another disk
        problem: Exception | None = None
        try:
            if first == (rank == 0):
                rows = MediaRows(file)
        except (OSError, ValueError) as error:
            problem = error
        _raise_first(None if problem is None else (0, problem), size)
    assert rows is not None
    failed: tuple[int, Exception] | None = None
    if decode:
        mine = range(rank, rows.conversations, size)
        for number, outcome in zip(mine, in_order(_Decoded(rows), mine, workers), strict=True):
            if isinstance(outcome, Exception):
                failed = number, outcome
                break
    _raise_first(failed, size)
    return rows.packed.describe()


class MediaRows:
    """Rows of a file, and the media of each: `Samples` in another order in each epoch."""

    def __init__(self, file: ChatFile, seed: int = 0) -> None:
        self.path, self.config, self.pack, self.seed = os.fspath(file.path), file.config, file.pack, seed
        self.encoder = OmniEncoder(
            file.processor, file.config, os.path.dirname(self.path), most=file.seq_length
        )
        self.packed = PackedConversations(
            self.path, self.encoder, file.seq_length, file.multiple, file.cache, file.pack
        )
        #: Of the whole file.
        self.conversations = self.packed.in_file

    def place(self, conversation: int) -> str:
        """`file:line` of a conversation, by its number in the file."""
        return f"{self.path}:{self.packed.origin(conversation)[0]}"

    def encoded(self, conversation: int) -> WithMedia:
        """Read a conversation again, with its media's headers."""
        _, offset, part = self.packed.origin(conversation)
        place = self.place(conversation)
        if offset < 0:
            raise ValueError(f"{place}: conversations with media are read again: give JSON lines")
        with open_outside(self.path) as file:
            file.seek(offset)
            row = parse_line(file.readline(), place, form=READING.current().form)
        found: Conversation = list(row)[part]
        encoded = self.encoder.encode(found)
        if not np.array_equal(encoded.ids, self.packed.tokens_of(conversation)):
            raise MediaError(
                f"{place}: its media are not those that its tokens were made for: remove {self.packed.folder}"
            )
        return encoded

    def row(self, number: int) -> PackedRow:
        return self.packed.row(self._place(number))

    def media(self, number: int, modalities: tuple[str, ...]) -> list[Batch]:
        return [self.decoded(one, modalities) for one in self.packed.members(self._place(number))]

    def _place(self, number: int) -> int:
        epoch, place = divmod(number, len(self.packed))
        return int(epoch_order(self.seed, epoch, len(self.packed))[place])

    def decoded(self, conversation: int, modalities: tuple[str, ...]) -> Batch:
        """Decode the media of a conversation for these modalities: `modality_inputs`."""
        known, tokens = self.packed.tokens_of(conversation), self.config.special_ids()
        if not np.isin(known, [tokens[name] for name in modalities if name in tokens]).any():
            return {}
        found = [one for one in self.encoded(conversation).media if one.modality in modalities]
        return self.encoder.decode(found, self.place(conversation))


class Microbatches(Dataset[Any]):
    """Microbatch by number: this rank's batch, or the exception that making it raised."""

    def __init__(self, source: Samples, samples: int, lanes: Mapping[str, tuple[int, int]]) -> None:
        known = (LANGUAGE, *source.config.special_ids())
        if not lanes or set(lanes) - set(known):
            raise ValueError(f"lanes of {', '.join(lanes) or 'no module'}: give some of {', '.join(known)}")
        self.source, self.samples = source, samples
        self.shares = {name: sample_shares(samples, size)[lane] for name, (lane, size) in lanes.items()}
        if source.pack and len(self.shares.get(LANGUAGE, ())) > 1:
            raise ValueError(
                f"a lane of {len(self.shares[LANGUAGE])} packed rows: use a micro-batch size of 1 and longer "
                "rows, or do not pack"
            )
        self.special = source.config.special_ids()

    @one_thread()  # sums depend on the number of threads
    def __getitem__(self, number: int) -> Batch | Exception:
        # An exception is returned, because a worker would raise it with its own traceback.
        try:
            return self._batch(number)
        except (OSError, ValueError) as problem:
            return problem

    def _batch(self, number: int) -> Batch:
        begin = number * self.samples
        rows = [self.source.row(begin + i) for i in range(self.samples)]
        first = LANGUAGE if LANGUAGE in self.shares else next(iter(self.shares))
        mine = [rows[i] for i in self.shares[first]]
        packed = self.source.pack
        batch: Batch = {
            "input_ids": _stack(mine, "tokens"),
            "position_ids": _stack(mine, "positions"),
            "labels": _stack(mine, "labels"),
            "loss_mask": _stack(mine, "loss_mask"),
            "modality_inputs": {},
            "microbatch": describe_ids(
                np.stack([row.tokens for row in rows]),
                self.special,
                [row.borders.tolist() for row in rows] if packed else (),
            ),
        }
        if packed and first == LANGUAGE:
            borders = mine[0].borders
            longest = int(np.diff(borders).max())
            batch["packing_kwargs"] = pack_arguments(torch.from_numpy(borders), longest, len(mine[0].tokens))
        for names in _equal_shares(self.shares):
            decoded = [one for i in self.shares[names[0]] for one in self.source.media(begin + i, names)]
            for name in names:
                if joined := join(decoded, name):
                    batch["modality_inputs"][name] = joined
        return batch


class _Decoded(Dataset[Any]):
    def __init__(self, rows: MediaRows) -> None:
        self.rows = rows

    def __getitem__(self, conversation: int) -> Exception | None:
        try:
            self.rows.decoded(conversation, tuple(ENCODER))
        except (OSError, ValueError) as problem:
            return problem
        return None


def in_order(dataset: Dataset[Any], numbers: Any, workers: int) -> Iterator[Any]:
    """torch's loader of single items, in their order; `workers` forked processes make them, 0: this one."""
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=_uncollated,
        generator=torch.Generator(),  # the loader seeds its workers; the job's generator stays as it is
    )
    # A forked worker must not collect garbage of this process: a process group among it, or a decoder, waits
    # for threads that do not exist there, and the worker hangs or dies.
    gc.freeze()
    try:
        items = iter(loader)
    finally:
        gc.unfreeze()
    yield from items


def _uncollated(item: Any) -> Any:
    return item


def _raised(items: Any) -> Iterator[Batch]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def _equal_shares(shares: Mapping[str, range]) -> list[tuple[str, ...]]:
    """Modalities of this rank, those with the same samples together, so that a file is read once."""
    groups: dict[range, list[str]] = {}
    for name, share in shares.items():
        if name != LANGUAGE:
            groups.setdefault(share, []).append(name)
    return [tuple(names) for names in groups.values()]


def _stack(rows: list[PackedRow], name: str) -> torch.Tensor:
    return torch.from_numpy(np.stack([getattr(row, name) for row in rows]))


def _raise_first(mine: tuple[int, Exception] | None, size: int) -> None:
    """Raise the problem of the lowest number on every rank, if any rank has one."""
    found: list[Any] = [mine]
    if size > 1:
        found = [None] * size
        torch.distributed.all_gather_object(found, mine)
    if problems := [one for one in found if one is not None]:
        raise min(problems, key=lambda one: one[0])[1]
