"""The header that ranks exchange when row counts are not known: one fixed-size all-gather.

It runs before the first exchange of an edge, which compares dtype and width once, and before every forward
exchange without a `RowFeed`. The host waits for it, and every rank sees every header.

The ranks of a source lane announce their rows for each of `shares` equal shares of the lane's samples. If the
number of all shares is a multiple of both lane counts, each destination lane takes whole shares, in order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.groups import BoundaryError, Failure, Groups, by_value

#: A dtype is sent as its index.
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
#: Upstream's attribute of an encoder's output: the rows of each sample.
SPLIT_SIZES = "_mimo_bridge_split_sizes"
#: The row count of a share that the rank does not know.
UNKNOWN = -1
_ROW_DIMENSIONS = 3
#: present, dtype, dimensions of a row and their sizes, gradient, digest and total of the feed, rows.
_FIXED = 3 + _ROW_DIMENSIONS + 4


class RowsError(BoundaryError, ValueError):
    """The headers of the ranks do not fit together. Upstream raises ValueError in these cases."""


class Announcement(NamedTuple):
    """What this rank announces about the rows of one edge.

    senders, receivers: ranks that send rows, and those that announce what they expect, by data lane.
    shares: number of equal shares into which a lane's samples are cut.
    rows: [n, ...] that this rank sends; None if it sends none.
    counts: rows of each share; None if not known.
    sharded: each rank of a lane holds a part of its rows; otherwise all hold the same rows.
    described: row counts and description of the microbatch by the feed; None without a feed.
    expected: rows of each of the `expected_shares` of this rank's receiving lane; None if not known.
    """

    name: str
    senders: tuple[tuple[int, ...], ...]
    shares: int
    rows: Tensor | None
    counts: tuple[int, ...] | None
    sharded: bool = False
    described: tuple[tuple[int, ...], object] | None = None
    needs_gradient: bool = False
    receivers: tuple[tuple[int, ...], ...] = ()
    expected: tuple[int, ...] | None = None
    expected_shares: int = 0


class HeaderAgreement(NamedTuple):
    """What the headers of all ranks say together.

    counts: rows of each share over all source lanes, or UNKNOWN.
    row, dtype: shape and dtype of a row; None if no rank has rows.
    expected: rows that each share over all receiving lanes expects, or UNKNOWN; empty without receivers.
    """

    counts: tuple[int, ...]
    row: tuple[int, ...] | None
    dtype: torch.dtype | None
    lane_rows: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    needs_gradient: bool = False


class _Header(NamedTuple):
    present: bool
    dtype: int
    row: tuple[int, ...]
    digest: int
    total: int
    counts: tuple[int, ...]
    rows: int = 0
    needs_gradient: bool = False
    expected: tuple[int, ...] = ()


def share_counts(rows: int, shares: int, sizes: Sequence[int] | None, uneven: bool) -> tuple[int, ...]:
    """Rows of each of `shares` equal shares of a lane's samples."""
    if shares == 1:
        return (rows,)
    if sizes is not None:
        if len(sizes) % shares or sum(sizes) != rows:
            raise ValueError(
                f"{len(sizes)} samples with {sum(sizes)} rows, but {rows} rows in {shares} shares are sent: "
                f"set {SPLIT_SIZES} to the rows of each sample"
            )
        each = len(sizes) // shares
        return tuple(int(sum(sizes[i : i + each])) for i in range(0, len(sizes), each))
    share, rest = divmod(rows, shares)
    if rest and not uneven:
        raise ValueError(
            f"{rows} rows of a lane do not divide into {shares} shares: give the row counts (RowFeed, or "
            f"{SPLIT_SIZES} on the tensor)"
        )
    return tuple(share + (i < rest) for i in range(shares))


def agree(announcements: Sequence[Announcement], groups: Groups, failure: Failure) -> list[HeaderAgreement]:
    """Exchange headers: one agreement for each edge, the same on every rank of `groups`."""
    width = _FIXED + max(a.shares + a.expected_shares for a in announcements)
    own = torch.tensor([_encode(a, width, failure) for a in announcements], dtype=torch.int64)
    own = own.to(groups.device).view(-1)
    gathered = torch.empty(len(groups.ranks) * own.numel(), dtype=torch.int64, device=groups.device)
    names = ", ".join(a.name for a in announcements)
    with failure.guarded(lambda: f"{names}: waited for the headers of ranks {list(groups.ranks)}"):
        dist.all_gather_into_tensor(gathered, own, group=groups.group)
        numbers = gathered.view(len(groups.ranks), len(announcements), width).tolist()
    found = []
    for i, announcement in enumerate(announcements):
        headers = {rank: _decode(numbers[at][i], announcement) for at, rank in enumerate(groups.ranks)}
        try:
            found.append(_agreement(announcement, headers))
        except ValueError as error:
            raise RowsError(f"{announcement.name}: {error}") from None
    return found


def _encode(announcement: Announcement, width: int, failure: Failure) -> list[int]:
    name, rows, described = announcement.name, announcement.rows, announcement.described
    digest, total = -1, -1
    if described is not None:
        digest, total = zlib.crc32(repr(described).encode()), sum(described[0])
    kind = [0] * (3 + _ROW_DIMENSIONS)
    unknown = 0
    if rows is not None:
        row, unknown = list(rows.shape[1:]), UNKNOWN
        if rows.dtype not in DTYPES or len(row) > _ROW_DIMENSIONS:
            failure.fail(
                f"{name}: rows of shape {tuple(row)} in {rows.dtype} cannot be sent: use at most "
                f"{_ROW_DIMENSIONS} dimensions and one of {[str(d) for d in DTYPES]}"
            )
        kind = [1, DTYPES.index(rows.dtype), len(row), *row, *[0] * (_ROW_DIMENSIONS - len(row))]
    record = [
        *(*kind, announcement.needs_gradient, digest, total, 0 if rows is None else len(rows)),
        *(announcement.counts or (unknown,) * announcement.shares),
        *(announcement.expected or (UNKNOWN,) * announcement.expected_shares),
    ]
    return record + [0] * (width - len(record))


def _decode(record: list[int], announcement: Announcement) -> _Header:
    needs_gradient, digest, total, rows = record[_FIXED - 4 : _FIXED]
    rows_end = _FIXED + announcement.shares
    return _Header(
        present=bool(record[0]),
        dtype=record[1],
        row=tuple(record[3 : 3 + record[2]]),
        digest=digest,
        total=total,
        counts=tuple(record[_FIXED:rows_end]),
        rows=rows,
        needs_gradient=bool(needs_gradient),
        expected=tuple(record[rows_end : rows_end + announcement.expected_shares]),
    )


def _agreement(announcement: Announcement, headers: dict[int, _Header]) -> HeaderAgreement:
    described = {rank: (h.digest, h.total) for rank, h in headers.items()}
    _require_equal(described, _feed_text, "describe the microbatch")
    sending = {rank: headers[rank] for lane in announcement.senders for rank in lane if headers[rank].present}
    _require_equal({rank: h.dtype for rank, h in sending.items()}, lambda d: str(DTYPES[d]), "have the dtype")
    _require_equal({rank: h.row for rank, h in sending.items()}, str, "have rows of the shape")
    counts: list[int] = []
    lane_rows: list[int] = []
    for lane in announcement.senders:
        if announcement.sharded:
            columns = zip(*(headers[rank].counts for rank in lane), strict=True)
            counts += [UNKNOWN if UNKNOWN in column else sum(column) for column in columns]
            lane_rows.append(sum(headers[rank].rows for rank in lane))
        else:
            _require_equal({rank: headers[rank].rows for rank in lane}, str, "of one lane have row counts")
            _require_equal({rank: headers[rank].counts for rank in lane}, str, "have rows in numbers")
            counts += headers[lane[0]].counts
            lane_rows.append(headers[lane[0]].rows)
    first = next(iter(sending.values()), None)
    return HeaderAgreement(
        tuple(counts),
        first and first.row,
        DTYPES[first.dtype] if first else None,
        tuple(lane_rows),
        tuple(rows for lane in announcement.receivers for rows in headers[lane[0]].expected),
        any(h.needs_gradient for h in headers.values()),
    )


def _feed_text(described: tuple[int, int]) -> str:
    digest, total = described
    return "without row counts (no feed)" if total < 0 else f"with {total} rows (digest {digest:08x})"


def _require_equal(values: dict[int, Any], text: Callable[[Any], str], what: str) -> None:
    groups = by_value(values)
    if len(groups) > 1:
        sides = "; ".join(f"ranks {ranks} {what} {text(value)}" for value, ranks in groups.items())
        raise ValueError(f"{sides}: they must agree; give all of them the same configuration and batches")
