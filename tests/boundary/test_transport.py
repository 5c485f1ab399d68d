"""Rows and gradients equal plain concatenation bit for bit, in the bytes and messages of the plan.

Modules on ranks of their own are connected by `Bridge`, those that share ranks by `ColocatedBridge`.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from torch.utils.checkpoint import checkpoint

from megatron_nemotron3.boundary.agreement import SPLIT_SIZES, share_counts
from megatron_nemotron3.boundary.bridge import Bridge
from megatron_nemotron3.boundary.colocated import ColocatedBridge, ModalityRows, communicate
from megatron_nemotron3.boundary.coordinator import Coordinator
from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.feed import FeedStream, Microbatch, RowFeed
from megatron_nemotron3.boundary.groups import BoundaryError
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.traffic import traffic
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.boundary_reference import media_of, rows_given, rows_wanted, runs_of, unit
from tests.support.wire import counted

HIDDEN = 5
#: TP and DP of 4 + 4 ranks in every combination, then what upstream refuses.
RELATIONS = [(f"tp={a},dp={4 // a}", f"tp={b},dp={4 // b},offset=4") for a in (1, 2, 4) for b in (1, 2, 4)]
UNEVEN = [
    ("dp=3", "tp=2,dp=2,offset=3"),
    ("tp=2,dp=2", "dp=3,offset=4"),
    ("pp=2,dp=2", "tp=2,pp=2,offset=4"),
    ("tp=1,dp=1", "tp=3,dp=2,offset=1"),
    ("dp=4", "tp=2,cp=2,offset=4"),
    ("tp=2,dp=2", "cp=2,dp=2,offset=4"),
    ("tp=4", "tp=4,offset=4,sp"),
    ("dp=3", "cp=2,tp=2,offset=4,sp"),
    ("tp=2,dp=2,sp", "tp=2,dp=2,offset=4,sp"),
]
#: On six ranks.
SHARED = [
    ("dp=6", "tp=6"),
    ("tp=6", "dp=6"),
    ("tp=2,dp=3", "tp=3,dp=2"),
    ("tp=3,dp=2", "tp=2,dp=3"),
    ("dp=6", "tp=3,dp=2"),
    ("tp=2,dp=3", "tp=2,dp=3"),
    ("dp=6", "tp=1,pp=2,dp=3"),
    ("tp=2,dp=3", "tp=3,pp=2"),
    ("dp=6", "tp=6,sp"),
    ("dp=6", "tp=3,cp=2"),
    ("tp=3,dp=2", "tp=3,cp=2,sp"),
    ("dp=6", "cp=3,dp=2"),
    ("tp=2,dp=3", "tp=2,pp=3"),
    ("tp=3,dp=2,sp", "tp=6"),
    ("tp=3,dp=2,sp", "tp=3,cp=2,sp"),
    ("gtp_remat=2,dp=3,order=tp-gtp_remat-dp", "tp=3,dp=2"),
    ("cp=3,dp=2,share=zigzag", "tp=6,sp"),
    ("tp=2,cp=3,share=contiguous", "tp=3,cp=2,sp"),
    ("cp=2,dp=3,share=media", "dp=6"),
    ("cp=6,share=media", "tp=3,cp=2,sp"),
]


def bridge(source: str, destination: str, dtype: torch.dtype = torch.float32, ndim: int = 2) -> Any:
    """The communicator of two modules, as `Layout.parse` reads their layouts."""
    a, b = Layout.parse(source), Layout.parse(destination)
    grids = [
        HyperCommGrid([size for _, size in at.dimensions], [name for name, _ in at.dimensions], at.offset)
        for at in (a, b)
    ]
    if a.offset != b.offset:
        edge = Edge("images", "language", a, b, ndim, 0, dtype)
        return Bridge(*grids, comm_dtype=dtype, tensor_ndim=ndim, edge=edge)
    return ColocatedBridge(
        *grids,
        "images",
        "language",
        {"b": 0, "h": 1},
        sequence_parallel=b.sequence_parallel,
        source_sequence_parallel=a.sequence_parallel,
        source_share=a.share,
        timeout=timedelta(minutes=10),  # beyond any run's: a wait that ends with it fails the test
    )


def images(source: Layout, samples: int, length: int, seed: int) -> np.ndarray:
    """[samples, length] of bool: positions of rows, of which some samples have none; seed 3: of text only."""
    random = np.random.default_rng(seed)
    image = random.random((samples, length)) < random.choice([0.0, 0.3, 0.9], size=(samples, 1))
    image[0] = seed % 2 == 0
    image &= seed != 3
    return image & (image.cumsum(1) <= (image.sum(1) // unit(source) * unit(source))[:, None])


def described(source: Layout, image: np.ndarray, **more: np.ndarray) -> Any:
    runs = {
        name: [runs_of(np.flatnonzero(sample).tolist()) for sample in marked]
        for name, marked in {"images": image, **more}.items()
    }
    media = {"images": [media_of(source, int(n)) for n in image.sum(1)]}
    return Microbatch.of(runs=runs, lengths=[image.shape[1]] * len(image), media=media)


def values(rows: Any, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """[n, HIDDEN], different for every row number."""
    at = torch.as_tensor(np.asarray(rows, int), dtype=torch.float32).view(-1, 1)
    return torch.sin(at * HIDDEN + torch.arange(HIDDEN) + salt).to(dtype)


def crossed(
    comm: Any, image: np.ndarray, dtype: torch.dtype, *, fed: bool, header: bool, combined: bool
) -> int:
    """One microbatch there and back on this rank; how many rows were compared."""
    edge, rank = comm.edge, dist.get_rank()
    known = described(edge.source, image)
    wanting = edge.destination
    if not fed and wanting.sliced:  # without positions whole lanes arrive
        wanting = Layout.of(tp=wanting.tp * wanting.cp, dp=wanting.dp)
    given, taken = (side.get(rank) for side in (rows_given(edge.source, image), rows_wanted(wanting, image)))
    tensor = values([] if given is None else given, dtype).requires_grad_()
    if given is not None:
        lane, share = edge.source.lane_of(rank), len(image) // edge.source.dp
        setattr(tensor, SPLIT_SIZES, image.sum(1)[lane * share : (lane + 1) * share].tolist())
    gradient = values([] if taken is None else taken, dtype, salt=7)
    out, back = gradient, None
    with counted() as wire:
        if edge.shared:
            out = comm.communicate(tensor, known if fed else None)
            out.backward(gradient)
            back = tensor.grad
        else:
            comm.coordinator.training = FeedStream(RowFeed([known], lambda it: it) if fed else None)
            if given is not None and combined:
                back = comm.send_forward_recv_backward(tensor)
            elif given is not None:
                comm.send_forward(tensor)
                back = comm.recv_backward()
            elif taken is not None and combined:
                out = comm.send_backward_recv_forward(gradient)
            elif taken is not None:
                out = comm.recv_forward()
                comm.send_backward(gradient)
    if taken is not None:
        assert torch.equal(out, values(taken, dtype)) and out.requires_grad and out.dtype == dtype
    if given is not None:
        assert torch.equal(back, values(given, dtype, salt=7)) and back.dtype == dtype
    plan = edge.plan(known.rows_of("images"), HIDDEN * dtype.itemsize, known if fed else None)
    moved = [traffic(way) for way in (plan, plan.backward)]
    sent, received = (sum(side.get(rank, 0) for side in sides) for sides in zip(*(m[:2] for m in moved)))
    assert wire.crossing == (sent * plan.row_bytes, received * plan.row_bytes)
    assert wire.messages == sum(
        message.destination != rank for way in (plan, plan.backward) for message in way.sends(rank)
    )
    if given is not None or taken is not None:
        assert (wire.control > 0, wire.host_waits > 0) == (header, header)
    return len(tensor) + len(gradient)


def check(pairs: list[tuple[str, str]]) -> list[int]:
    """All pairs, with a feed and without, with several microbatches: how many rows of each were compared."""
    found = []
    for number, (source, destination) in enumerate(pairs):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        comm = bridge(source, destination, dtype)
        edge, compared = comm.edge, 0
        samples = math.lcm(edge.source.dp, edge.destination.dp) * (1 + number % 2)
        length = 4 * edge.destination.cp * edge.destination.tp
        plain = not edge.source.sliced and (edge.shared or not edge.destination.sliced)
        for fed, seed in [(fed, seed) for fed in (True, False)[: 1 + plain] for seed in range(4)]:
            if dist.get_rank() in edge.ranks:
                image = images(edge.source, samples, length, seed)
                header = not fed or seed == 0  # the first exchange compares dtype and width
                compared += crossed(comm, image, dtype, fed=fed, header=header, combined=bool(seed % 2))
        found.append(compared)
        comm.destroy() if edge.shared else comm.close()
    assert not Bridge._alive
    return found


def three_dimensions() -> None:
    """[b, s, h] tensors are exchanged by sample; the length may change between microbatches."""
    rank = dist.get_rank()
    for a, b, samples in [
        ("dp=2", "dp=1,offset=2", 4),
        ("dp=1", "dp=2,offset=1", 4),
        ("dp=2", "tp=2,offset=2", 2),
    ]:
        comm = bridge(a, b, ndim=3)
        for length in (5, 2):
            full = torch.randn(samples, length, 3, generator=torch.Generator().manual_seed(length))
            for lanes, method in (
                (comm.edge.senders, comm.send_forward_recv_backward),
                (comm.edge.receivers, comm.send_backward_recv_forward),
            ):
                for lane, ranks in enumerate(lanes):
                    if rank in ranks:
                        mine = full.chunk(len(lanes))[lane]
                        gives = lanes is comm.edge.senders
                        assert torch.equal(method(mine if gives else -mine), -mine if gives else mine)
        comm.close()


def everything(pairs: list[tuple[str, str]]) -> list[int]:
    three_dimensions()
    return check(pairs)


def test_every_rank_gets_its_rows_and_their_gradients_come_back() -> None:
    """Fan-in, fan-out, lanes that do not divide, TP ratios, CP and SP, empty lanes."""
    ranks = run_distributed(everything, 8, RELATIONS[::3] + UNEVEN[::2] + SHARED[1::2])
    assert all(map(any, zip(*ranks, strict=True)))


@pytest.mark.full
def test_all_layouts() -> None:
    ranks = run_distributed(check, 8, RELATIONS + UNEVEN + SHARED, timeout=300)
    assert all(map(any, zip(*ranks, strict=True)))


def modalities() -> None:
    """Two modalities, one message to each rank and each way; frozen ones have no way back."""
    rank = dist.get_rank()
    vision = bridge("dp=4", "tp=4,sp")
    audio = ColocatedBridge(
        *(vision.src_grid, vision.dest_grid, "audio", "language", {"b": 0, "h": 1}),
        sequence_parallel=True,
        groups_from=vision,
    )
    seen = np.ones((4, 8), bool)
    both = described(vision.source, seen, audio=seen)
    given, taken = rows_given(vision.source, seen)[rank], rows_wanted(vision.destination, seen)[rank]
    for trained in ((True, True), (False, False), (False, True)):
        tensors = [values(given, salt=i).requires_grad_(need) for i, need in enumerate(trained)]
        with counted() as wire:
            parts = [ModalityRows(vision, tensors[0]), ModalityRows(audio, tensors[1])]
            out = communicate(parts, both)
            weighted = sum((i + 1) * rows.sum() for i, rows in enumerate(out) if trained[i])
            if any(trained):
                weighted.backward()
        assert wire.messages == 3 * (1 + any(trained))
        for i, rows in enumerate(out):
            assert torch.equal(rows, values(taken, salt=i)) and rows.requires_grad == trained[i]
            assert not trained[i] or bool((tensors[i].grad == i + 1).all())


def gradients_of_some() -> None:
    """Recompute, and ranks that differ in whether their rows need a gradient."""
    comm, rank = bridge("dp=2", "tp=2,offset=0"), dist.get_rank()
    if rank > 1:
        return
    seen = np.ones((2, 8), bool)
    batch = described(comm.source, seen)
    given, taken = rows_given(comm.source, seen)[rank], rows_wanted(comm.destination, seen)[rank]
    tensor = values(given).requires_grad_()
    doubled = checkpoint(lambda rows: comm.communicate(rows * 2, batch), tensor, use_reentrant=False)
    assert torch.equal(doubled, 2 * values(taken))
    doubled.sum().backward()
    assert tensor.grad is not None and bool((tensor.grad == 2).all())
    assert not comm.communicate(tensor, batch, backward=False).requires_grad
    # It is agreed that gradients come back, or the header says so.
    for options in ({"microbatch": batch, "backward": True}, {}):
        tensor = values(given).requires_grad_(rank == 0)
        comm.communicate(tensor, **options).sum().backward()
        assert (tensor.grad is not None) == (rank == 0)
    # With a batch dimension in the middle, a sample is a row.
    comm.edge = replace(comm.edge, batch_dimension=1)
    part = (torch.arange(12.0).view(3, 2, 2) + 100 * rank).requires_grad_()
    whole = torch.arange(12.0).view(3, 2, 2)
    out = comm.communicate(part)
    assert torch.equal(out, torch.cat([whole, whole + 100], 1))
    out.backward(out.detach())
    assert part.grad is not None and torch.equal(part.grad, part.detach())


REFUSED = [
    ("pp=2", "tp=2", "src PP must be 1"),
    ("cp=2", "tp=2", "src CP must be 1, or it must be said how its ranks share rows"),
    ("tp=2", "tp=3", "same number of ranks"),
]


def on_shared_ranks() -> None:
    for source, destination, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            bridge(source, destination)
    gradients_of_some()
    modalities()


def test_modalities_recompute_and_ranks_that_differ_in_requires_grad() -> None:
    run_distributed(on_shared_ranks, 4)


WRONG = {
    "rows": (
        lambda rows: rows.repeat(2, 1),
        "rank 1: images -> language, forward: 16 rows, but the row counts",
    ),
    "dtype": (lambda rows: rows.double(), "rows are torch.float64, agreed is torch.float32"),
    "width": (lambda rows: rows[:, :3], r"rows of shape \(3,\), agreed is \(5,\)"),
    "header dtype": (lambda rows: rows.double(), r"ranks \[1\] have the dtype torch.float64"),
    "header width": (lambda rows: rows[:, :3], r"ranks \[1\] have rows of the shape \(3,\)"),
    "header replicas": (lambda rows: rows[:-1], r"ranks \[1\] of one lane have row counts 15"),
    # By both replicas of lane 0.
    "header shares": (lambda rows: rows[:-1], "15 of lane 0 is not divisible by fan_out scale=2"),
}


def failing() -> list[str]:
    """The error where rank 1 does something wrong, in every case."""
    found = []
    for kind, (spoil, _) in WRONG.items():
        replicas = kind in ("header replicas", "header shares")
        comm = bridge("tp=2,dp=2", "dp=4") if replicas else bridge("dp=4", "tp=4")
        wrong = (0, 1) if kind == "header shares" else (1,)
        seen = np.ones((4, 8), bool)
        rows = values(rows_given(comm.source, seen)[dist.get_rank()])
        batch = described(comm.source, seen) if not kind.startswith("header") else None
        comm.communicate(rows, batch)
        with pytest.raises(BoundaryError) as error:
            comm.communicate(spoil(rows) if dist.get_rank() in wrong else rows, batch)
        found.append(str(error.value))
        comm.destroy()
        dist.barrier()
    return found


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    """That rank says what; the others say so, too, or where to look, and do not wait for a timeout."""
    ranks = run_distributed(failing, 4)
    for case, (_, words) in enumerate(WRONG.values()):
        errors = [found[case] for found in ranks]
        assert re.search(words, errors[1]), errors
        assert all(re.search(words, said) or "failed or ended first" in said for said in errors), errors


def test_shares_of_the_samples_of_a_lane() -> None:
    """Without a feed: by the rows of each sample, else in equal parts, else refused."""
    assert share_counts(7, 1, [3, 3], uneven=False) == (7,)
    assert share_counts(6, 2, [0, 3, 1, 2], uneven=False) == (3, 3)
    assert share_counts(6, 3, None, uneven=False) == (2, 2, 2)
    assert share_counts(7, 3, None, uneven=True) == tuple(len(t) for t in torch.arange(7).tensor_split(3))
    for rows, shares, sizes in [(7, 3, None), (6, 2, [1, 2, 3]), (6, 2, [2, 2])]:
        with pytest.raises(ValueError, match="_mimo_bridge_split_sizes"):
            share_counts(rows, shares, sizes, uneven=False)


def two_edges() -> None:
    """Small messages of two modalities are one message; a feed leaves nothing but rows."""
    rank = dist.get_rank()
    for fed in (True, False):
        edges = [
            Edge(name, "language", Layout.of(dp=2), Layout.of(offset=2), dtype=torch.float32)
            for name in ("images", "audio")
        ]
        coordinator = Coordinator(edges)
        batches = [{"images": [3, n + 1], "audio": [n, 2]} for n in range(4)]
        if fed:
            coordinator.training = FeedStream(RowFeed(batches, Microbatch.of))
        for number, batch in enumerate(batches):
            mine = {name: torch.full((rows[rank % 2], HIDDEN), 1.0 + rank) for name, rows in batch.items()}
            with counted() as wire:
                inputs, _ = coordinator.run(mine if rank < 2 else None, forward=True)
                gradients = {n: t.detach() for n, t in inputs.items()}
                _, returned = coordinator.run(gradients=gradients, backward=True)
            for name, rows in batch.items():
                expected = [1.0] * rows[0] + [2.0] * rows[1] if rank > 1 else [1.0 + rank] * rows[rank]
                assert (inputs if rank > 1 else returned)[name][:, 0].tolist() == expected
            header = not fed or number == 0
            assert (wire.control, wire.messages) == (header, 1 if rank < 2 else 2)
            assert (wire.host_waits > 0) == header
        coordinator.close()


def test_two_edges_into_a_module() -> None:
    run_distributed(two_edges, 3)
