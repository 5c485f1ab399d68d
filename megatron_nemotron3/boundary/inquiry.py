"""The headers of edges: what this rank says, and what it makes of the answers (`header.agree`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_nemotron3.boundary import header
from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.failure import Failure
from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.groups import Groups

#: Upstream's name for the rows of each sample, put on an encoder's output.
SPLIT_SIZES = "_mimo_bridge_split_sizes"


def ask_forward(
    edges: Sequence[Edge],
    rows: Mapping[Edge, Tensor | None],
    outputs: Mapping[str, Any],
    counted: Mapping[Edge, tuple[int, ...]],
    microbatch: Microbatch | None,
    groups: Groups,
    failure: Failure,
) -> dict[Edge, header.Answer]:
    """What will cross.

    Args:
        rows: of the edges to which this rank sends.
        outputs: the tensors that they are made of, which may know the rows of each sample.
        counted: rows of each sample by the feed, of the edges that it describes; compared among the ranks.

    Raises:
        BoundaryError: the same on every rank: they differ, or rows are not `edge.hidden` wide.
    """
    asks = []
    for edge in edges:
        slots = edge.shares // edge.source.dp
        described = (counted[edge], microbatch) if edge in counted else None
        counts: tuple[int, ...] = ()
        if (mine := rows.get(edge)) is not None:
            sizes = getattr(outputs.get(edge.source_name), SPLIT_SIZES, None)
            # With a feed its counts are those of the plan, to which the rows are held later.
            counts = _counts(edge, mine, slots, None if described else sizes, bool(described), failure)
        asks.append(
            header.Ask(edge.name, edge.senders, edge.source.sequence_parallel, slots, mine, counts, described)
        )
    answers = header.agree(asks, groups, failure) if asks else []
    for edge, answer in zip(edges, answers, strict=True):
        if edge.ndim == 2 and answer.row is not None and edge.hidden not in (None, *answer.row):
            failure.fail(
                f"{edge.name}: rows are {answer.row[0]} wide, the language model takes {edge.hidden}: set "
                "the projector's output size to its hidden size"
            )
    return dict(zip(edges, answers, strict=True))


def ask_backward(
    edges: Sequence[Edge], rows: Mapping[Edge, Tensor | None], groups: Groups, failure: Failure
) -> dict[Edge, header.Answer]:
    """What gradients will cross of rows that never did. Raises as `ask_forward`."""
    asks = []
    for edge in edges:
        if edge.destination.sliced:
            failure.fail(f"{edge.name}: a gradient without a forward exchange: send the rows before")
        slots = edge.shares // edge.destination.dp
        mine = rows.get(edge)
        counts = () if mine is None else _counts(edge, mine, slots, None, False, failure)
        asks.append(header.Ask(edge.name, edge.receivers, False, slots, mine, counts, None))
    answers = header.agree(asks, groups, failure) if asks else []
    return dict(zip(edges, answers, strict=True))


def _counts(
    edge: Edge, rows: Tensor, slots: int, sizes: Sequence[int] | None, described: bool, failure: Failure
) -> tuple[int, ...]:
    uneven = described or edge.shares in (edge.source.dp, edge.destination.dp)
    try:
        return header.counts_of(rows.shape[0], slots, sizes, uneven)
    except ValueError as error:
        failure.fail(f"{edge.name}: {error}", error)
