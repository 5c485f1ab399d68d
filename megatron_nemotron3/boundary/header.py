"""What ranks tell each other of rows that nobody knows beforehand: one fixed-size all-gather.

Used for the first exchange of an edge, where both sides agree on width, dtype and row counts once, and for
every forward exchange without a `RowFeed`. Everyone sees every header, so everyone comes to the same verdict.
The host waits for it: a feed avoids that.

Rows of a lane that gives are announced for each of `slots` equal shares of its samples, so many that the
shares of all lanes, in order, can be dealt to the lanes that take (lcm of the numbers of lanes).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.failure import Failure
from megatron_nemotron3.boundary.groups import Groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8)
#: Dimensions of a row that fit.
_ROW_DIMENSIONS = 3
#: present, dtype, dimensions of a row, their sizes, digest and total of what the feed says.
_FIXED = 3 + _ROW_DIMENSIONS + 2


class Ask(NamedTuple):
    """What one rank knows of one edge.

    name: of the edge.
    lanes: ranks that give rows, by lane.
    sharded: ranks of a lane have a part of its rows each.
    slots: shares of a lane's samples.
    rows: [n, ...] that this rank gives; None: it gives none, or has none to show.
    counts: of each slot of `rows`.
    described: rows of each sample, and whatever else the feed says; None without a feed.
    """

    name: str
    lanes: tuple[tuple[int, ...], ...]
    sharded: bool
    slots: int
    rows: Tensor | None
    counts: tuple[int, ...]
    described: tuple[tuple[int, ...], object] | None


class Answer(NamedTuple):
    """What all ranks agree on: rows of each slot over all lanes, the shape of a row, its dtype.

    row is None if nobody gives a row.
    """

    counts: tuple[int, ...]
    row: tuple[int, ...] | None
    dtype: torch.dtype | None


class _Header(NamedTuple):
    """One rank's, of one edge."""

    present: bool
    dtype: int
    row: tuple[int, ...]
    digest: int
    total: int
    counts: tuple[int, ...]


def counts_of(rows: int, slots: int, sizes: Sequence[int] | None, uneven: bool) -> tuple[int, ...]:
    """Rows of each of `slots` shares of a lane's samples.

    Args:
        rows: of the lane.
        sizes: rows of each of its samples (upstream's `_mimo_bridge_split_sizes`), if they are known.
        uneven: without sizes, the first shares may have one row more (`torch.tensor_split`, as upstream does
            in fan-out).

    Raises:
        ValueError: sizes that are not of these rows, or rows that do not divide.
    """
    if slots == 1:
        return (rows,)
    if sizes is not None:
        if len(sizes) % slots or sum(sizes) != rows:
            raise ValueError(
                f"{len(sizes)} samples with {sum(sizes)} rows, but {rows} rows cross in {slots} shares: "
                "_mimo_bridge_split_sizes must have the rows of each sample"
            )
        each = len(sizes) // slots
        return tuple(int(sum(sizes[i : i + each])) for i in range(0, len(sizes), each))
    share, rest = divmod(rows, slots)
    if rest and not uneven:
        raise ValueError(
            f"{rows} rows of a lane do not divide into {slots} shares: give the row counts (RowFeed, or "
            "_mimo_bridge_split_sizes on the tensor)"
        )
    return tuple(share + (i < rest) for i in range(slots))


def agree(asks: Sequence[Ask], groups: Groups, failure: Failure) -> list[Answer]:
    """One answer for each edge, the same on every rank of the hub.

    Raises:
        BoundaryError: the same on every rank: replicas of a lane, or lanes, or the two sides differ.
    """
    width = _FIXED + max(ask.slots for ask in asks)
    mine = torch.tensor([_encode(ask, width, failure) for ask in asks], dtype=torch.int64)
    mine = mine.to(groups.device).view(-1)
    everyone = torch.empty(len(groups.ranks) * mine.numel(), dtype=torch.int64, device=groups.device)
    names = ", ".join(ask.name for ask in asks)
    with failure.guarded(lambda: f"{names}: waited for the headers of ranks {list(groups.ranks)}"):
        dist.all_gather_into_tensor(everyone, mine, group=groups.hub)
        numbers = everyone.view(len(groups.ranks), len(asks), width).tolist()
    found = []
    for i, ask in enumerate(asks):
        headers = {rank: _decode(numbers[at][i], ask.slots) for at, rank in enumerate(groups.ranks)}
        try:
            found.append(_answer(ask, headers))
        except ValueError as error:
            failure.fail(f"{ask.name}: {error}")
    return found


def _encode(ask: Ask, width: int, failure: Failure) -> list[int]:
    digest, total = -1, -1
    if ask.described is not None:
        digest, total = zlib.crc32(repr(ask.described).encode()), sum(ask.described[0])
    if ask.rows is None:
        fixed = [0] * (3 + _ROW_DIMENSIONS)
    else:
        row = list(ask.rows.shape[1:])
        if ask.rows.dtype not in DTYPES or len(row) > _ROW_DIMENSIONS:
            failure.fail(
                f"{ask.name}: rows of {tuple(row)} {ask.rows.dtype} cannot cross: use at most "
                f"{_ROW_DIMENSIONS} dimensions and one of {[str(d) for d in DTYPES]}"
            )
        fixed = [1, DTYPES.index(ask.rows.dtype), len(row), *row, *[0] * (_ROW_DIMENSIONS - len(row))]
    record = [*fixed, digest, total, *(ask.counts or (0,) * ask.slots)]
    return record + [0] * (width - len(record))


def _decode(record: list[int], slots: int) -> _Header:
    row = tuple(record[3 : 3 + record[2]])
    digest, total = record[_FIXED - 2 : _FIXED]
    return _Header(bool(record[0]), record[1], row, digest, total, tuple(record[_FIXED : _FIXED + slots]))


def _answer(ask: Ask, headers: dict[int, _Header]) -> Answer:
    """Raises ValueError where the ranks differ."""
    _same({rank: (h.digest, h.total) for rank, h in headers.items()}, _described, "describe the microbatch")
    giving = {rank: headers[rank] for lane in ask.lanes for rank in lane if headers[rank].present}
    _same({rank: h.dtype for rank, h in giving.items()}, lambda d: str(DTYPES[d]), "have the dtype")
    _same({rank: h.row for rank, h in giving.items()}, str, "have rows of the shape")
    counts: list[int] = []
    for lane in ask.lanes:
        if ask.sharded:
            counts += [sum(headers[rank].counts[slot] for rank in lane) for slot in range(ask.slots)]
        else:
            _same({rank: headers[rank].counts for rank in lane}, str, "have rows in numbers")
            counts += headers[lane[0]].counts
    some = next(iter(giving.values()), None)
    return Answer(tuple(counts), some and some.row, DTYPES[some.dtype] if some else None)


def _described(said: tuple[int, int]) -> str:
    return "without row counts (no feed)" if said[1] < 0 else f"with {said[1]} rows (digest {said[0]:08x})"


def _same(values: dict[int, object], text: object, what: str) -> None:
    groups: dict[object, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if len(groups) > 1:
        said = "; ".join(f"ranks {ranks} {what} {text(value)}" for value, ranks in groups.items())  # type: ignore[operator]
        raise ValueError(f"{said}: they must agree; give all of them the same configuration and batches")
