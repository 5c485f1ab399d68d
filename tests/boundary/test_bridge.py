"""One edge for all relations of layouts: rows and gradients equal plain concatenation bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed

#: (source, destination): TP and DP of 4 + 4 ranks in every combination, then what upstream refuses.
RELATIONS = [(f"tp={a},dp={4 // a}", f"tp={b},dp={4 // b},offset=4") for a in (1, 2, 4) for b in (1, 2, 4)]
UNEVEN = [
    ("dp=3", "tp=2,dp=2,offset=3"),
    ("tp=2,dp=2", "dp=3,offset=4"),
    ("pp=2,dp=2", "tp=2,pp=2,offset=4"),
    ("tp=1,dp=1", "tp=3,dp=2,offset=1"),
]
SLICED = [
    ("dp=4", "tp=2,cp=2,offset=4"),
    ("tp=2,dp=2", "cp=2,dp=2,offset=4"),
    ("tp=4", "tp=4,offset=4,sp"),
    ("dp=3", "cp=2,tp=2,offset=4,sp"),
    ("tp=2,dp=2,sp", "tp=2,dp=2,offset=4,sp"),
]


def _ragged(samples: int) -> list[list[int]]:
    return [
        [3] * samples,
        [(5 * i + 2) % 7 for i in range(samples)],
        [0] * (samples - 1) + [9],
        [11] + [0] * (samples - 1),
        [0] * samples,
        [1200] + [300] * (samples - 1),  # beyond the leader path
    ]


def _bridge(source: str, destination: str, dtype: Any, ndim: int = 2) -> Any:
    import torch
    from megatron.core.hyper_comm_grid import HyperCommGrid

    from megatron_nemotron3.boundary.bridge import Bridge
    from megatron_nemotron3.boundary.edge import Edge
    from megatron_nemotron3.boundary.layout import Layout

    assert torch.distributed.is_initialized()
    layouts = [Layout.parse(text) for text in (source, destination)]
    grids = [
        HyperCommGrid([size for _, size in at.dimensions], [name for name, _ in at.dimensions], at.offset)
        for at in layouts
    ]
    # The grids do not know of sequence parallelism.
    edge = Edge("images", "language", *layouts, ndim, 0, dtype)
    return Bridge(*grids, comm_dtype=dtype, tensor_ndim=ndim, edge=edge)


def _relations(relations: list[tuple[str, str]]) -> list[str]:
    """On every rank: differences to the reference, for all relations and raggednesses."""
    import math

    import torch
    import torch.distributed as dist

    from megatron_nemotron3.boundary.agreement import SPLIT_SIZES
    from megatron_nemotron3.boundary.bridge import Bridge
    from megatron_nemotron3.boundary.feed import FeedStream, Microbatch, RowFeed
    from tests.support.boundary_reference import every_row, lane_of, of_lane

    rank, wrong = dist.get_rank(), []
    for number, (a, b) in enumerate(relations):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        bridge = _bridge(a, b, dtype)
        edge = bridge.edge
        give, take = lane_of(edge.source, edge.source.pp - 1, rank), lane_of(edge.destination, 0, rank)
        batches = _ragged(math.lcm(edge.source.dp, edge.destination.dp) * (1 + number % 2))
        for fed in (False, True):
            bridge.coordinator.training = FeedStream(
                RowFeed(batches, lambda n: Microbatch.of({"images": n})) if fed else None
            )
            for step, rows in enumerate(batches):
                samples = every_row(rows, 6, dtype, step)
                what = f"{a} to {b}, {rows}, feed {fed}"
                if give is not None:
                    mine = of_lane(samples, edge.source.dp, give)
                    sent = mine.clone().requires_grad_()
                    share = len(rows) // edge.source.dp
                    setattr(sent, SPLIT_SIZES, rows[give * share : (give + 1) * share])
                    if step % 2:
                        back = bridge.send_forward_recv_backward(sent)
                    else:
                        bridge.send_forward(sent)
                        back = bridge.recv_backward()
                    if not torch.equal(back, mine * 2) or back.dtype != dtype:
                        wrong.append(f"{what}: gradient")
                elif take is not None:
                    expected = of_lane(samples, edge.destination.dp, take)
                    if step % 2:
                        found = bridge.send_backward_recv_forward(expected * 2)
                    else:
                        found = bridge.recv_forward()
                        bridge.send_backward(found.detach() * 2)
                    if not torch.equal(found, expected) or not found.requires_grad or not found.is_leaf:
                        wrong.append(f"{what}: rows")
        bridge.close()
    assert not Bridge._alive
    return wrong


def _slices() -> list[str]:
    """The same for destinations whose ranks own positions."""
    import math

    import numpy as np
    import torch
    import torch.distributed as dist

    from megatron_nemotron3.boundary.feed import FeedStream, RowFeed, describe_ids
    from tests.support.boundary_reference import every_row, lane_of, of_lane, of_rank

    rank, wrong, random = dist.get_rank(), [], np.random.default_rng(0)
    for a, b in SLICED:
        bridge = _bridge(a, b, torch.bfloat16)
        edge = bridge.edge
        give, take = lane_of(edge.source, 0, rank), lane_of(edge.destination, 0, rank)
        count = math.lcm(edge.source.dp, edge.destination.dp)
        batches = [(random.random((count, 16)) < share).astype(int) for share in (0.5, 0.0, 1.0, 0.2)]
        if edge.source.sequence_parallel:
            batches = [np.repeat(np.arange(16)[None] % 4 < 2, count, 0).astype(int)]
        bridge.coordinator.training = FeedStream(
            RowFeed(batches, lambda ids: describe_ids(ids, {"images": 1}))
        )
        for step, ids in enumerate(batches):
            samples = every_row(ids.sum(1).tolist(), 6, torch.bfloat16, step)
            if give is not None:
                mine = of_lane(samples, edge.source.dp, give)
                if edge.source.sequence_parallel:
                    mine = mine.chunk(edge.source.tp)[edge.source.lanes(0)[give].index(rank)]
                bridge.send_forward(mine)
                if not torch.equal(bridge.recv_backward(), mine * 2):
                    wrong.append(f"{a} to {b}, {step}: gradient")
            elif take is not None:
                expected = of_rank(samples, ids.astype(bool).tolist(), edge.destination, take, rank)
                found = bridge.recv_forward()
                if not torch.equal(found, expected):
                    wrong.append(f"{a} to {b}, {step}: rows")
                bridge.send_backward(found.detach() * 2)
        bridge.close()
    return wrong


def _three_dimensions() -> list[str]:
    """[b, s, h] tensors are exchanged by sample; the length may change between microbatches."""
    import torch
    import torch.distributed as dist

    rank, wrong = dist.get_rank(), []
    for a, b, samples in [
        ("dp=2", "dp=1,offset=2", 4),
        ("dp=1", "dp=2,offset=1", 4),
        ("dp=2", "tp=2,offset=2", 2),
    ]:
        bridge = _bridge(a, b, torch.float32, ndim=3)
        for length in (5, 2):
            full = torch.randn(samples, length, 3, generator=torch.Generator().manual_seed(length))
            edge = bridge.edge
            mine = {r: full.chunk(edge.source.dp)[i] for i, lane in enumerate(edge.senders) for r in lane}
            theirs = {
                r: full.chunk(edge.destination.dp)[i] for i, lane in enumerate(edge.receivers) for r in lane
            }
            if rank in mine:
                if not torch.equal(bridge.send_forward_recv_backward(mine[rank]), -mine[rank]):
                    wrong.append(f"{a} to {b}: gradient")
            elif rank in theirs and not torch.equal(
                bridge.send_backward_recv_forward(-theirs[rank]), theirs[rank]
            ):
                wrong.append(f"{a} to {b}: activations")
        bridge.close()
    return wrong


def _all() -> list[str]:
    return _relations(RELATIONS[::3] + UNEVEN[:2]) + _slices() + _three_dimensions()


def test_relations_slices_and_raggedness():
    """Fan-in, fan-out, lanes that do not divide, TP ratios, CP and SP destinations, empty lanes."""
    for rank, wrong in enumerate(run_distributed(_all, 8, timeout=100)):
        assert not wrong, f"rank {rank}: {wrong[:5]}"


@pytest.mark.full
def test_every_relation():
    """All combinations of TP and DP on 4 + 4 ranks."""
    for rank, wrong in enumerate(run_distributed(_relations, 8, RELATIONS + UNEVEN, timeout=200)):
        assert not wrong, f"rank {rank}: {wrong[:5]}"
