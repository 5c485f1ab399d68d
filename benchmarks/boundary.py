"""Traffic between modules, counted at the calls of torch.distributed: our communicator beside upstream's.

    python benchmarks/boundary.py [--rows 2048] [--hidden 256] [--quick]

4 + 4 gloo processes on the CPU. V is the bytes of a microbatch's rows. "busiest" is what the busiest rank
sends or receives between the modules, in V; the bound is max(V / S, V / D) for S and D boundary ranks, or for
ragged rows what `traffic.bounds` says. "inside" is what enters the busiest rank from its own module (a group
that replicates must gather). Bytes and messages are counted in every process at the calls of
torch.distributed (wire.py), for the second microbatch: the first one agrees on width and dtype. Integers
(shapes, headers) are counted apart: "4 + 8, 6" is 4 messages with rows, 8 calls with integers (all ranks) and
6 reads of a tensor's value by the host. Every value is compared with plain concatenation; "wrong" says what
differs. None of this is a time;
what one GPU takes for its part is measured by gpu_boundary.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
from typing import Any, NamedTuple

from common import print_table

#: (TP, DP) of four ranks.
SHAPES = ((1, 4), (2, 2), (4, 1))


class Case(NamedTuple):
    """One case.

    source, destination: layouts for `Layout.parse`.
    shares: share of all rows in each of 4 samples.
    kind: description for the table.
    sliced: whether ranks of the destination own slices.
    """

    source: str
    destination: str
    shares: tuple[float, ...] = (0.25,) * 4
    kind: str = ""
    sliced: bool = False


class Measured(NamedTuple):
    """Counts of one rank and direction.

    sent, received, inside: bytes of messages, and bytes that entered in collectives.
    messages, control, waits: messages with rows, calls for integers, reads of a value by the host.
    wrong: difference to the reference, if any.
    """

    sent: int
    received: int
    inside: int
    messages: int
    control: int
    waits: int
    wrong: str


def cases(quick: bool) -> list[Case]:
    """Every relation of 4 + 4 ranks, then ragged rows and slices."""
    found = [
        Case(f"tp={a},dp={b}", f"tp={c},dp={d},offset=4")
        for (a, b), (c, d) in itertools.product(SHAPES, SHAPES)
    ]
    ragged = (0.55, 0.25, 0.15, 0.05)
    found += [
        Case("dp=4", "tp=4,offset=4", ragged, "ragged"),
        Case("dp=4", "tp=2,dp=2,offset=4", ragged, "ragged"),
        Case("tp=4", "dp=4,offset=4", ragged, "ragged"),
        Case("tp=2,dp=2", "tp=4,offset=4", (0.5, 0.5, 0.0, 0.0), "text-only lane"),
        Case("tp=2,dp=2", "tp=2,cp=2,offset=4,sp", kind="slices", sliced=True),
        Case("dp=4", "cp=4,offset=4", kind="slices", sliced=True),
    ]
    return found[:3] + found[-6:] if quick else found


def rows_of(case: Case, rows: int) -> list[int]:
    """Rows of each sample: V is the same for all cases."""
    return [round(share * rows) for share in case.shares]


def batch(case: Case, rows: int) -> Any:
    """Token ids [4, s]: rows (1) spread over the sequence, among text (0)."""
    import numpy as np

    length = 2 * max(rows_of(case, rows))
    length += -length % 64
    random = np.random.default_rng(0)
    ids = np.zeros((4, length), np.int64)
    for sample, n in enumerate(rows_of(case, rows)):
        ids[sample, random.permutation(length)[:n]] = 1
    return ids


def measure(ours: bool, todo: list[Case], rows: int, hidden: int) -> list[tuple[Measured, Measured]]:
    """Counts of this rank for every case, forward and backward."""
    import logging

    from tests.support.boundary_upstream import gloo_groups

    logging.disable(logging.INFO)
    if not ours:
        gloo_groups()
    return [_one(ours, case, rows, hidden) for case in todo]


def _one(ours: bool, case: Case, rows: int, hidden: int) -> tuple[Measured, Measured]:
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    from megatron_nemotron3.boundary.bridge import Bridge
    from megatron_nemotron3.boundary.edge import Edge
    from megatron_nemotron3.boundary.feed import FeedStream, RowFeed, tokens
    from megatron_nemotron3.boundary.layout import Layout
    from tests.support.boundary_reference import rows_given, rows_wanted

    rank = dist.get_rank()
    source, destination = Layout.parse(case.source), Layout.parse(case.destination)
    grids = [_grid(source), _grid(destination)]
    ids = batch(case, rows)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(rows_of(case, rows)), hidden, generator=generator)
    given = rows_given(source, ids.astype(bool)).get(rank)
    wanted = rows_wanted(destination, ids.astype(bool)).get(rank)
    mine, theirs = (None if numbers is None else values[numbers] for numbers in (given, wanted))
    if ours:
        edge = Edge("images", "language", source, destination, 2, 0, torch.float32)
        bridge: Any = Bridge(*grids, comm_dtype=torch.float32, tensor_ndim=2, edge=edge)
        feed = RowFeed([{"ids": ids}] * 2, tokens("ids", {"images": 1}))
        bridge.coordinator.training = FeedStream(feed)
    else:
        try:
            bridge = BridgeCommunicator(*grids, comm_dtype=torch.float32, tensor_ndim=2)
        except (AssertionError, ValueError) as error:
            refused = Measured(0, 0, 0, 0, 0, 0, f"refused: {error}")
            return refused, refused
    _cross(bridge, mine, theirs)
    dist.barrier()
    found = _cross(bridge, mine, theirs)
    if ours:
        bridge.close()
    else:
        dist.barrier()
        BridgeCommunicator.destroy_broadcast_pgs()
        BridgeCommunicator.destroy_bridge_pgs()
    return found


def _grid(layout: Any) -> Any:
    from megatron.core.hyper_comm_grid import HyperCommGrid

    names = ["tp", "cp", "pp", "dp"]
    return HyperCommGrid([layout.size_of(name) for name in names], names, layout.offset)


def _cross(bridge: Any, mine: Any, theirs: Any) -> tuple[Measured, Measured]:
    """One microbatch there and its gradient (twice the rows) back."""
    import torch
    import torch.distributed as dist
    from wire import counted

    wrong = ["", ""]
    with counted() as ahead:
        if mine is not None:
            bridge.send_forward(mine)
        elif theirs is not None:
            found = bridge.recv_forward()
        dist.barrier()
    if theirs is not None:
        wrong[0] = "" if torch.equal(found, theirs) else f"{len(found)} rows for {len(theirs)}, or others"
    with counted() as back:
        if theirs is not None:
            bridge.send_backward(theirs * 2)
        elif mine is not None:
            found = bridge.recv_backward()
        dist.barrier()
    if mine is not None:
        good = torch.equal(found, mine * 2)
        wrong[1] = "" if good else f"gradient of {len(found)} rows for {len(mine)}, or others"
    return tuple(  # type: ignore[return-value]
        Measured(*wire.crossing, wire.shared, wire.messages, wire.control, wire.host_waits, text)
        for wire, text in zip((ahead, back), wrong, strict=True)
    )


def bound_of(case: Case, rows: int, back: bool) -> float:
    """Lower bound for the share of V that the busiest rank sends or receives."""
    from megatron_nemotron3.boundary.feed import describe_ids
    from megatron_nemotron3.boundary.layout import Layout
    from megatron_nemotron3.boundary.plan import make_plan, slices_of
    from megatron_nemotron3.boundary.traffic import bounds

    source, destination = Layout.parse(case.source), Layout.parse(case.destination)
    counts, slices = rows_of(case, rows), None
    if case.sliced:
        known = describe_ids(batch(case, rows), {"images": 1})
        slices = slices_of(destination, known.runs_of("images") or (), known.lengths)
    plan = make_plan(source, destination, counts, row_bytes=1, slices=slices)
    return bounds(plan.backward if back else plan).busiest / sum(counts)


def summary(ranks: list[Measured], total: int) -> dict[str, Any]:
    """Results of all ranks for one case and direction."""
    return {
        "busiest": max(max(one.sent, one.received) for one in ranks) / total,
        "crossing": sum(one.sent for one in ranks) / total,
        "inside": max(one.inside for one in ranks) / total,
        "messages": sum(one.messages for one in ranks),
        "integers": sum(one.control for one in ranks),
        "waits": sum(one.waits for one in ranks),
        "wrong": next((f"rank {rank}: {one.wrong}" for rank, one in enumerate(ranks) if one.wrong), ""),
    }


def wire_table(rows: int, hidden: int, quick: bool) -> None:
    """Run both communicators and print the tables."""
    from megatron_nemotron3.proof.certify.ranks import run_distributed

    todo = cases(quick)
    with contextlib.redirect_stdout(io.StringIO()):
        sides = [run_distributed(measure, 8, ours, todo, rows, hidden, timeout=580) for ours in (True, False)]
    total = rows * hidden * 4
    print(f"V = {rows} rows of {hidden} FP32 = {total / 2**20:.2f} MiB; 4 + 4 ranks; second microbatch, feed")
    table, ratios = [], []
    for (number, case), way in itertools.product(enumerate(todo), (0, 1)):
        ours, theirs = (summary([rank[number][way] for rank in side], total) for side in sides)
        bound = bound_of(case, rows, bool(way))
        refused = "refused" in theirs["wrong"]
        ratio = math.nan if refused else theirs["busiest"] / ours["busiest"]
        ratios += [] if refused or case.kind else [ratio]
        table.append(
            [
                f"{case.source} to {case.destination.replace(',offset=4', '')} {case.kind}".strip(),
                "back" if way else "forward",
                f"{bound:.3f}",
                f"{ours['busiest']:.3f}",
                "-" if refused else f"{theirs['busiest']:.3f}",
                "-" if refused else f"{ratio:.2f}",
                f"{ours['crossing']:.2f}",
                f"{ours['inside']:.2f}",
                "-" if refused else f"{theirs['inside']:.2f}",
                "{messages} + {integers}, {waits}".format(**ours),
                "-" if refused else "{messages} + {integers}, {waits}".format(**theirs),
                ours["wrong"] or "ok",
                theirs["wrong"] or "ok",
            ]
        )
    header = "layouts|way|bound|ours|upstream|ratio|crossing|inside|upstream|messages|upstream|ours|upstream"
    print_table(header.split("|"), table)
    ratios.sort()
    print(
        f"\nupstream's busiest rank over ours, {len(ratios)} uniform cases: {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}"
    )


def main() -> None:
    """Read arguments, print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048, help="of a microbatch, a multiple of 16")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="nine of the cases")
    given = parser.parse_args()
    wire_table(given.rows, given.hidden, given.quick)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
