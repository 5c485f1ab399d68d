"""What ranks that share two modules tell each other where no feed does: one all-gather of a few numbers.

All see all numbers, so what does not fit together is the same error everywhere, and nobody waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.failure import BoundaryError

if TYPE_CHECKING:
    from megatron_nemotron3.boundary.colocated import Colocated

#: A dtype's number in the header.
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip
#: Dimensions of a row, at most.
DIMENSIONS = 3
UNDIVIDED = -1


class RowsError(BoundaryError, ValueError):
    """What ranks gave does not fit together; upstream raises ValueError."""


class Header(NamedTuple):
    """What a rank tells.

    rows: of its buffer.
    parts: of them, those of equal shares of its source lane's samples; UNDIVIDED where that is not known.
    marked: rows that shares of its destination lane's samples ask for; UNDIVIDED where that is not known.
    """

    kind: tuple[int, ...]
    need: int
    rows: int
    parts: tuple[int, ...]
    marked: tuple[int, ...]


def agree(
    comm: Colocated,
    rows: Tensor,
    need: bool,
    sizes: Sequence[int] | None = None,
    marked: Sequence[int] | None = None,
    count: bool = True,
) -> tuple[tuple[int, ...], bool]:
    """Row counts of a microbatch, for as many equal shares of samples as both sides' lanes are cut into.

    Args:
        rows: [n, ...] of this rank.
        need: whether it requires a gradient.
        sizes: rows of each sample of this rank's source lane; None: equal parts, if nobody knows.
        marked: rows that each sample of its destination lane asks for, if it is known.
        count: whether row counts are asked for, or just what all ranks have in common.

    Returns: (rows of each share, whether any rank requires a gradient).

    Raises:
        RowsError: dtypes, widths, or the rows of one lane differ, or rows do not divide.
    """
    shares = math.lcm(comm.source.dp, comm.destination.dp)
    given, taken = shares // comm.source.dp, shares // comm.destination.dp
    shape = [*rows.shape[1:]][:DIMENSIONS]
    kind = (DTYPES.index(rows.dtype), rows.ndim, *shape, *[0] * (DIMENSIONS - len(shape)))
    parts = _shares(sizes, given) if sizes is not None and sum(sizes) == len(rows) else None
    if parts is None:
        parts = [UNDIVIDED] * given if len(rows) % given else [len(rows) // given] * given
    wanted = _shares(marked, taken) if marked is not None else None
    mine = [*kind, need, len(rows), *parts, *(wanted or [UNDIVIDED] * taken)]
    sent = torch.tensor(mine, dtype=torch.int64, device=rows.device)
    gathered = sent.new_empty(len(comm.groups.ranks) * len(mine))
    dist.all_gather_into_tensor(gathered, sent, group=comm.groups.hub)
    lines = gathered.view(-1, len(mine)).tolist()
    n = len(kind)
    headers = {
        rank: Header(
            tuple(line[:n]), line[n], line[n + 1], tuple(line[n + 2 :][:given]), tuple(line[n + 2 + given :])
        )
        for rank, line in zip(comm.groups.ranks, lines, strict=True)
    }
    counts = _counts(comm, headers, given, count)
    return counts, any(header.need for header in headers.values())


def _counts(comm: Colocated, headers: dict[int, Header], given: int, count: bool) -> tuple[int, ...]:
    name = comm.src_module_name
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank, header in headers.items():
        kinds.setdefault(header.kind, []).append(rank)
    if len(kinds) > 1:
        words = "; ".join(f"ranks {ranks} {_words(kind)}" for kind, ranks in sorted(kinds.items()))
        raise RowsError(f"rows of {name} differ: {words}: use one dtype and width in all lanes")
    if count and comm.source.sequence_parallel and comm.source.tp > 1:
        raise RowsError(f"rows of {name} are split over TP={comm.source.tp}: give the row counts (RowFeed)")
    marked = [rows for ranks in comm.destination.lanes(0) for rows in headers[ranks[0]].marked]
    counts: list[int] = []
    for lane, ranks in enumerate(comm.source.lanes(0) if count else ()):
        held = {rank: headers[rank].rows for rank in ranks}
        if len(set(held.values())) > 1:
            raise RowsError(
                f"lane {lane} of {name}: its tensor ranks have {held} rows: they must hold the same rows"
            )
        asked = marked[lane * given : (lane + 1) * given]
        rows, parts = held[ranks[0]], headers[ranks[0]].parts
        if UNDIVIDED not in marked and sum(asked) != rows:
            raise RowsError(
                f"lane {lane} of {name} gave {rows} rows, but input_ids ask for {sum(asked)}: encoder input "
                "and input_ids must be of the same samples"
            )
        if UNDIVIDED in marked and UNDIVIDED in parts:
            raise RowsError(
                f"lane {lane} of {name}: its batch dim size {rows} is not divisible by "
                f"{comm.direction.value} scale={given}: tell the rows of each sample "
                "(a Microbatch, or _mimo_bridge_split_sizes)"
            )
        counts += asked if UNDIVIDED not in marked else parts
    return tuple(counts)


def _shares(sizes: Sequence[int], number: int) -> list[int] | None:
    """Sums over equal shares of the samples, in order."""
    each, rest = divmod(len(sizes), number)
    return None if rest else [sum(sizes[i * each : (i + 1) * each]) for i in range(number)]


def _words(line: Sequence[int]) -> str:
    return f"have {[*line[2:][: line[1] - 1]]} in {DTYPES[line[0]]}"
