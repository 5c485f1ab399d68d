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

from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.exchange import RowKind, other_rows
from megatron_nemotron3.boundary.groups import BoundaryError, Failure, Groups, by_value
from megatron_nemotron3.boundary.partition import sample_shares

#: A dtype is sent as its index.
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
#: Upstream's attribute of an encoder's output: the rows of each sample.
SPLIT_SIZES = "_mimo_bridge_split_sizes"
#: The row count of a share that is not in the data of the rank.
UNKNOWN = -1
_ROW_DIMENSIONS = 3
#: Single integers at the start of a header: dtype, dimensions of a row, digest, total, rows, gradient.
_FIXED = 6


class RowsError(BoundaryError, ValueError):
    """The headers of the ranks do not fit together. Upstream raises ValueError in these cases."""


class Announcement(NamedTuple):
    """What this rank has for one edge.

    rows: [n, ...], contiguous; None: it sends none.
    sizes: rows of each of its samples, if known.
    positions: number of positions for rows in each sample of its receiving lane, if known.
    needs_gradient: whether the rows require a gradient.
    described: row counts and description of the microbatch by the feed; None without a feed.
    backward: the rows are gradients, which the receivers of the edge send.
    """

    edge: Edge
    rows: Tensor | None
    sizes: Sequence[int] | None = None
    positions: Sequence[int] | None = None
    needs_gradient: bool = False
    described: tuple[tuple[int, ...], object] | None = None
    backward: bool = False

    @property
    def senders(self) -> tuple[tuple[int, ...], ...]:
        return self.edge.receivers if self.backward else self.edge.senders

    @property
    def shares(self) -> int:
        """Number of equal shares into which the samples of a sending lane are cut."""
        return self.edge.shares // len(self.senders)

    @property
    def expected_shares(self) -> int:
        """The same of a receiving lane. Only ranks on both sides have both rows and positions."""
        return self.edge.shares // self.edge.destination.dp if self.edge.shared and not self.backward else 0

    def counts(self) -> tuple[int, ...] | None:
        """Rows of each share of this rank's lane; None: not known. ValueError if no rank can count."""
        edge, sizes = self.edge, self.sizes
        if self.rows is None:
            return (0,) * self.shares
        uneven = edge.source.cp > 1 or edge.shares in (edge.source.dp, edge.destination.dp)
        if self.described is not None:  # rows are checked against its counts
            uneven, sizes = True, None
        try:
            return share_counts(len(self.rows), self.shares, sizes, uneven and not edge.shared)
        except ValueError:
            if edge.shared:
                return None
            raise

    def expected(self) -> tuple[int, ...] | None:
        """Rows of each share for which this rank's receiving lane has positions; None: not known."""
        if self.positions is None or len(self.positions) % self.expected_shares:
            return None
        return share_counts(sum(self.positions), self.expected_shares, self.positions, uneven=False)


class HeaderAgreement(NamedTuple):
    """The headers of all ranks, joined.

    counts: rows of each share over all source lanes; empty with a feed, which has them.
    kind: None if no rank has rows.
    needs_gradient: whether the rows of any rank require a gradient.
    """

    counts: tuple[int, ...]
    kind: RowKind | None
    needs_gradient: bool


class _Header(NamedTuple):
    """What a rank announces; dtype: index in DTYPES, or -1 without rows; digest, total: of the feed."""

    dtype: int
    digest: int
    total: int
    rows: int
    needs_gradient: int
    row: tuple[int, ...]
    counts: list[int]
    expected: list[int]


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


def agree(
    announcements: Sequence[Announcement], groups: Groups, failure: Failure
) -> dict[Edge, HeaderAgreement]:
    """Exchange headers; the result is the same on every rank of `groups`."""
    if not announcements:
        return {}
    records = [_encoded(announcement, failure) for announcement in announcements]
    width = max(map(len, records))
    filled = [record + [0] * (width - len(record)) for record in records]
    own = torch.tensor(filled, dtype=torch.int64).to(groups.device).view(-1)
    gathered = torch.empty(len(groups.ranks) * own.numel(), dtype=torch.int64, device=groups.device)
    names = ", ".join(announcement.edge.name for announcement in announcements)
    with failure.guarded(lambda: f"{names}: waited for the headers of ranks {list(groups.ranks)}"):
        dist.all_gather_into_tensor(gathered, own, group=groups.group)
        numbers = gathered.view(len(groups.ranks), len(announcements), width).tolist()
    found = {}
    for i, announcement in enumerate(announcements):
        headers = {rank: _decoded(numbers[at][i], announcement) for at, rank in enumerate(groups.ranks)}
        try:
            found[announcement.edge] = _agreement(announcement, headers)
        except ValueError as error:
            raise RowsError(f"{announcement.edge.name}: {error}") from None
    return found


def _encoded(announcement: Announcement, failure: Failure) -> list[int]:
    edge, rows, described = announcement.edge, announcement.rows, announcement.described
    dtype, row = -1, []
    if rows is not None:
        row = list(rows.shape[1:])
        if rows.dtype not in DTYPES or len(row) > _ROW_DIMENSIONS:
            failure.fail(
                f"{edge.name}: rows of shape {tuple(row)} in {rows.dtype} cannot be sent: use at most "
                f"{_ROW_DIMENSIONS} dimensions and one of {[str(d) for d in DTYPES]}"
            )
        dtype = DTYPES.index(rows.dtype)
    digest, total = -1, -1
    if described is not None:
        digest, total = zlib.crc32(repr(described).encode()), sum(described[0])
    try:
        counts = announcement.counts()
    except ValueError as error:
        failure.fail(f"{edge.name}: {error}", error)
    return [
        *(dtype, len(row), digest, total, 0 if rows is None else len(rows), announcement.needs_gradient),
        *(row + [0] * (_ROW_DIMENSIONS - len(row))),
        *(counts or (UNKNOWN,) * announcement.shares),
        *(announcement.expected() or (UNKNOWN,) * announcement.expected_shares),
    ]


def _decoded(record: list[int], announcement: Announcement) -> _Header:
    dtype, dimensions, digest, total, rows, needs_gradient = record[:_FIXED]
    start = _FIXED + _ROW_DIMENSIONS
    row, numbers = record[_FIXED : _FIXED + dimensions], record[start:]
    counts, numbers = numbers[: announcement.shares], numbers[announcement.shares :]
    expected = numbers[: announcement.expected_shares]
    return _Header(dtype, digest, total, rows, needs_gradient, tuple(row), counts, expected)


def _agreement(announcement: Announcement, headers: dict[int, _Header]) -> HeaderAgreement:
    senders, sliced = announcement.senders, announcement.edge.source.sliced and not announcement.backward
    described = {rank: (header.digest, header.total) for rank, header in headers.items()}
    _require_equal(described, _feed_text, "describe the microbatch")
    kinds = {
        rank: RowKind(headers[rank].row, DTYPES[headers[rank].dtype])
        for lane in senders
        for rank in lane
        if headers[rank].dtype >= 0
    }
    _require_equal({rank: kind.dtype for rank, kind in kinds.items()}, str, "have the dtype")
    _require_equal({rank: kind.row for rank, kind in kinds.items()}, str, "have rows of the shape")
    counts: list[int] = []
    expected = [rows for lane in announcement.edge.receivers for rows in headers[lane[0]].expected]
    for number, lane in enumerate(senders):
        holding = [headers[rank] for rank in lane]
        if not sliced:
            _require_equal({rank: headers[rank].rows for rank in lane}, str, "of one lane have row counts")
            _require_equal({rank: tuple(headers[rank].counts) for rank in lane}, str, "have rows in numbers")
            holding = holding[:1]
        own = slice(number * announcement.shares, (number + 1) * announcement.shares)
        if announcement.described is None:
            counts += _share_rows(number, holding, expected[own] if UNKNOWN not in expected else [])
        elif not sliced:
            known = announcement.described[0]
            mine = sum(known[sample] for sample in sample_shares(len(known), len(senders))[number])
            if holding[0].rows != mine:
                raise ValueError(f"lane {number}: {other_rows(holding[0].rows, mine)}")
    needs_gradient = any(header.needs_gradient for header in headers.values())
    return HeaderAgreement(tuple(counts), next(iter(kinds.values()), None), needs_gradient)


def _share_rows(number: int, holding: Sequence[_Header], expected: Sequence[int]) -> Sequence[int]:
    """Rows of each share of a source lane: what the receivers expect, else what its ranks announce."""
    total = sum(header.rows for header in holding)
    if expected:
        if sum(expected) != total:
            raise ValueError(
                f"lane {number} gave {total} rows, but input_ids have {sum(expected)} positions for them: "
                "encoder input and input_ids must be of the same samples"
            )
        return expected
    counts = [header.counts for header in holding]
    if any(UNKNOWN in shares for shares in counts):
        raise ValueError(
            f"the batch dim size {total} of lane {number} is not divisible by fan_out "
            f"scale={len(counts[0])}: give the rows of each sample (a Microbatch, or {SPLIT_SIZES})"
        )
    return [sum(column) for column in zip(*counts, strict=True)]


def _feed_text(described: tuple[int, int]) -> str:
    digest, total = described
    return "without row counts (no feed)" if total < 0 else f"with {total} rows (digest {digest:08x})"


def _require_equal(values: dict[int, Any], text: Callable[[Any], str], what: str) -> None:
    groups = by_value(values)
    if len(groups) > 1:
        sides = "; ".join(f"ranks {ranks} {what} {text(value)}" for value, ranks in groups.items())
        raise ValueError(f"{sides}: they must agree; give all of them the same configuration and batches")
