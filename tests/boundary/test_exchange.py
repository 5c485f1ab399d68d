"""Communication of an exchange: bytes at the lower bound, few messages, and only rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_nemotron3.boundary import exchange
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.plan import make_plan
from megatron_nemotron3.boundary.traffic import bounds, traffic
from megatron_nemotron3.proof.certify.ranks import run_distributed

HIDDEN = 8
#: Rows of four samples.
MANY, FEW = (40, 24, 16, 48), (4, 4, 4, 4)
RELATIONS = [
    (Layout.of(tp=a, dp=4 // a), Layout.of(tp=b, dp=4 // b, offset=4)) for a in (1, 2, 4) for b in (1, 2, 4)
]


def _counted(rows_of_samples: tuple[int, ...], leader_bytes: int) -> list[dict[str, Any]]:
    """On this rank, for every relation and direction: bytes between modules, inside them, and messages."""
    import torch.distributed as dist

    from megatron_nemotron3.boundary.exchange import RankTransfer, RowKind
    from megatron_nemotron3.boundary.groups import Failure, Groups
    from tests.support.wire import counted

    rank, found = dist.get_rank(), []
    for source, destination in RELATIONS:
        groups = Groups(range(8), [*source.lanes(0), *destination.lanes(0)])
        failure = Failure(groups.abort)
        kind = RowKind((HIDDEN,), torch.float32)
        forward = replace(
            make_plan(source, destination, rows_of_samples, row_bytes=4 * HIDDEN), leader_bytes=leader_bytes
        )
        for plan in (forward, forward.backward):
            gives = any(rank in g.ranks for lane in plan.senders for g in lane)
            rows = torch.ones(plan.rows_held(rank), HIDDEN) if gives else None
            transfer = RankTransfer(plan, rows, not gives, kind, "test")
            with counted() as wire:
                exchange.exchange([transfer], groups, failure)
            found.append({"crossing": wire.crossing, "shared": wire.shared, "messages": wire.messages})
            assert wire.control == wire.host_waits == 0
        groups.close()
    return found


def _both() -> list[list[dict[str, Any]]]:
    return [_counted(MANY, 0), _counted(FEW, exchange.COALESCE_BYTES)]


@pytest.fixture(scope="module")
def wires() -> Any:
    """Of every rank: with many rows, and with few."""
    return run_distributed(_both, 8, timeout=100)


def test_bytes_are_the_bound(wires):
    """V is sent between the modules, max(V/S, V/D) by the busiest rank; a group gathers the rest."""
    rows, ranks = MANY, [many for many, _ in wires]
    for number, (source, destination) in enumerate(RELATIONS):
        forward = replace(make_plan(source, destination, rows, row_bytes=4 * HIDDEN), leader_bytes=0)
        for way, plan in enumerate((forward, forward.backward)):
            at = 2 * number + way
            limit, expected = bounds(plan), traffic(plan)
            assert (
                sum(r[at]["crossing"][0] for r in ranks)
                == sum(rows) * HIDDEN * 4
                == limit.crossing * 4 * HIDDEN
            )
            for rank, found in enumerate(ranks):
                sent, received = found[at]["crossing"]
                assert (
                    sent == expected.sent.get(rank, 0) * HIDDEN * 4 <= limit.leaving.get(rank, 0) * HIDDEN * 4
                )
                assert received == expected.received.get(rank, 0) * 4 * HIDDEN
                assert received <= limit.entering.get(rank, 0) * HIDDEN * 4


def test_messages_are_those_of_the_plan(wires):
    """Few rows between lanes that correspond one to one are one message, whatever the tensor ranks."""
    rows, ranks = FEW, [few for _, few in wires]
    for number, (source, destination) in enumerate(RELATIONS):
        forward = replace(
            make_plan(source, destination, rows, row_bytes=4 * HIDDEN), leader_bytes=exchange.COALESCE_BYTES
        )
        for way, plan in enumerate((forward, forward.backward)):
            counted = sum(found[2 * number + way]["messages"] for found in ranks)
            assert counted == len(plan.messages)
            if source.dp == destination.dp:
                assert counted == source.dp
            assert sum(found[2 * number + way]["crossing"][0] for found in ranks) == 16 * 4 * HIDDEN


def _two_edges(fed: bool) -> list[tuple[int, int, int, int]]:
    """Per exchange after the first: control messages, row messages, host waits, collectives."""
    import torch.distributed as dist

    from megatron_nemotron3.boundary.coordinator import Coordinator
    from megatron_nemotron3.boundary.edge import Edge
    from megatron_nemotron3.boundary.feed import FeedStream, Microbatch, RowFeed
    from tests.support.wire import counted

    rank, found = dist.get_rank(), []
    language = Layout.of(offset=2)
    edges = [
        Edge(name, "language", Layout.of(dp=2), language, dtype=torch.float32) for name in ("images", "audio")
    ]
    coordinator = Coordinator(edges)
    batches = [{"images": [3, n + 1], "audio": [n, 2]} for n in range(4)]
    if fed:
        coordinator.training = FeedStream(RowFeed(batches, Microbatch.of))
    for batch in batches:
        mine = {name: torch.full((rows[rank % 2], HIDDEN), 1.0 + rank) for name, rows in batch.items()}
        with counted() as wire:
            inputs, _ = coordinator.run(mine if rank < 2 else None, forward=True)
            _, gradients = coordinator.run(
                gradients={n: t.detach() for n, t in inputs.items()}, backward=True
            )
        for name, rows in batch.items():
            expected = [1.0] * rows[0] + [2.0] * rows[1] if rank > 1 else [1.0 + rank] * rows[rank]
            got = inputs[name] if rank > 1 else gradients[name]
            assert got[:, 0].tolist() == expected
        found.append((wire.control, wire.messages, wire.host_waits, wire.collectives))
    coordinator.close()
    return found


def test_a_feed_leaves_nothing_but_rows():
    """With a feed only the first exchange has a header; without one every forward exchange has one, and only
    there the host waits. Small messages of two modalities between two ranks are coalesced."""
    for rank, found in enumerate(run_distributed(_two_edges, 3, True, timeout=60)):
        assert found[0][0] == 1
        assert [(control, waits) for control, _, waits, _ in found[1:]] == [(0, 0)] * 3
        assert [messages for _, messages, _, _ in found] == [1 if rank < 2 else 2] * 4
    for found in run_distributed(_two_edges, 3, False, timeout=60):
        assert [control for control, *_ in found] == [1] * 4
        assert all(waits > 0 for _, _, waits, _ in found)


def test_transfer_tags_tell_beliefs_apart():
    """The same name with other counts, shapes or segments has another tag."""
    a, b = RELATIONS[0]
    transfers = [
        exchange.RankTransfer(
            make_plan(a, b, rows, row_bytes=4), None, False, exchange.RowKind(row, torch.float32), name
        )
        for rows, row, name in [
            ((1, 2, 3, 4), (1,), "x"),
            ((1, 2, 4, 3), (1,), "x"),
            ((1, 2, 3, 4), (2,), "x"),
            ((1, 2, 3, 4), (1,), "y"),
        ]
    ]
    assert len({transfer.tag() for transfer in transfers}) == len(transfers)
    assert transfers[0].tag() == transfers[0]._replace(receives=True).tag()
