"""Traffic between modules, counted at the calls of torch.distributed: our communicator beside upstream's.

    python benchmarks/boundary.py [--rows 2048] [--hidden 256] [--quick]

4 + 4 gloo processes on the CPU. V is the bytes of a microbatch's rows. "busiest" is what the busiest rank
sends or receives between the modules, in V; the bound is max(V / S, V / D) for S and D boundary ranks, or for
ragged rows what `traffic.bounds` says. "inside" is what enters the busiest rank from its own module (a group
that replicates must gather). Bytes and messages are counted in every process at the calls of
torch.distributed (tests/support/wire.py), for the second microbatch: the first one agrees on width and dtype.
Integers (shapes, headers) are counted apart: "4 + 8, 6" is 4 messages with rows, 8 calls with integers (all
ranks) and 6 reads of a tensor's value by the host. Every value is compared with plain concatenation; the last
columns say what is wrong. None of this is a time; what one GPU takes for its part: boundary_rows.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
from typing import Any, NamedTuple

from common import MIB, parser, show

#: (TP, DP) of four ranks.
SHAPES = ((1, 4), (2, 2), (4, 1))


class Case(NamedTuple):
    """One case.

    source, destination: layouts for `Layout.parse`. shares: share of all rows in each of 4 samples. kind:
    description for the table. sliced: whether ranks of the destination own slices.
    """

    source: str
    destination: str
    shares: tuple[float, ...] = (0.25,) * 4
    kind: str = ""
    sliced: bool = False

    def rows(self, rows: int) -> list[int]:
        """Rows of each sample: V is the same for all cases."""
        return [round(share * rows) for share in self.shares]

    def ids(self, rows: int) -> Any:
        """Token ids [4, s]: rows (1) spread over the sequence, among text (0)."""
        import numpy as np

        length = 2 * max(self.rows(rows))
        length += -length % 64
        random = np.random.default_rng(0)
        ids = np.zeros((4, length), np.int64)
        for sample, n in enumerate(self.rows(rows)):
            ids[sample, random.permutation(length)[:n]] = 1
        return ids


RAGGED = (0.55, 0.25, 0.15, 0.05)
#: Every relation of 4 + 4 ranks, then ragged rows and slices.
CASES = [
    *(
        Case(f"tp={a},dp={b}", f"tp={c},dp={d},offset=4")
        for (a, b), (c, d) in itertools.product(SHAPES, SHAPES)
    ),
    Case("dp=4", "tp=4,offset=4", RAGGED, "ragged"),
    Case("dp=4", "tp=2,dp=2,offset=4", RAGGED, "ragged"),
    Case("tp=4", "dp=4,offset=4", RAGGED, "ragged"),
    Case("tp=2,dp=2", "tp=4,offset=4", (0.5, 0.5, 0.0, 0.0), "text-only lane"),
    Case("tp=2,dp=2", "tp=2,cp=2,offset=4,sp", kind="slices", sliced=True),
    Case("dp=4", "cp=4,offset=4", kind="slices", sliced=True),
]


def measure(ours: bool, todo: list[Case], rows: int, hidden: int) -> list[list[tuple[Any, str]]]:
    """What this rank counted for every case, forward and backward, and what was wrong."""
    import logging

    from tests.support.boundary_upstream import gloo_groups

    logging.disable(logging.INFO)
    if not ours:
        gloo_groups()
    return [_one(ours, case, rows, hidden) for case in todo]


def _one(ours: bool, case: Case, rows: int, hidden: int) -> list[tuple[Any, str]]:
    import torch
    import torch.distributed as dist
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    from megatron_nemotron3.boundary.bridge import Bridge
    from megatron_nemotron3.boundary.edge import Edge
    from megatron_nemotron3.boundary.feed import FeedStream, RowFeed, tokens
    from megatron_nemotron3.boundary.layout import Layout
    from tests.support.boundary_reference import rows_given, rows_wanted
    from tests.support.wire import Wire

    rank, names = dist.get_rank(), ["tp", "cp", "pp", "dp"]
    source, destination = Layout.parse(case.source), Layout.parse(case.destination)
    layouts = (source, destination)
    grids = [HyperCommGrid([one.size_of(name) for name in names], names, one.offset) for one in layouts]
    ids = case.ids(rows)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(case.rows(rows)), hidden, generator=generator)
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
            return [(Wire(), f"refused: {error}")] * 2
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


def _cross(bridge: Any, mine: Any, theirs: Any) -> list[tuple[Any, str]]:
    """One microbatch there and its gradient (twice the rows) back."""
    import torch
    import torch.distributed as dist

    from tests.support.wire import counted

    wrong = ["", ""]
    with counted() as ahead:
        if mine is not None:
            bridge.send_forward(mine)
        elif theirs is not None:
            found = bridge.recv_forward()
        dist.barrier()
    if theirs is not None and not torch.equal(found, theirs):
        wrong[0] = f"{len(found)} rows for {len(theirs)}, or others"
    with counted() as back:
        if theirs is not None:
            bridge.send_backward(theirs * 2)
        elif mine is not None:
            found = bridge.recv_backward()
        dist.barrier()
    if mine is not None and not torch.equal(found, mine * 2):
        wrong[1] = f"gradient of {len(found)} rows for {len(mine)}, or others"
    return [(ahead, wrong[0]), (back, wrong[1])]


def bound_of(case: Case, rows: int, back: bool) -> float:
    """Lower bound for the share of V that the busiest rank sends or receives."""
    from megatron_nemotron3.boundary.feed import describe_ids
    from megatron_nemotron3.boundary.layout import Layout
    from megatron_nemotron3.boundary.plan import make_plan, slices_of
    from megatron_nemotron3.boundary.traffic import bounds

    source, destination = Layout.parse(case.source), Layout.parse(case.destination)
    counts, slices = case.rows(rows), None
    if case.sliced:
        known = describe_ids(case.ids(rows), {"images": 1})
        slices = slices_of(destination, known.runs_of("images") or (), known.lengths)
    plan = make_plan(source, destination, counts, row_bytes=1, slices=slices)
    return bounds(plan.backward if back else plan).busiest / sum(counts)


def summary(ranks: list[tuple[Any, str]], total: int) -> dict[str, Any]:
    """Results of all ranks for one case and direction."""
    wires = [wire for wire, _ in ranks]
    wrong = next((f"rank {rank}: {text}" for rank, (_, text) in enumerate(ranks) if text), "")
    counts = [sum(getattr(w, name) for w in wires) for name in ("messages", "control", "host_waits")]
    return {
        "busiest": max(max(wire.crossing) for wire in wires) / total,
        "crossing": sum(wire.crossing[0] for wire in wires) / total,
        "inside": max(wire.shared for wire in wires) / total,
        "messages": "{} + {}, {}".format(*counts),
        "wrong": wrong or "ok",
    }


def main() -> None:
    """Run both communicators and print the tables."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=2048, help="of a microbatch, a multiple of 16")
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--quick", action="store_true", help="nine of the cases")
    args = options.parse_args()
    from megatron_nemotron3.proof.certify.ranks import run_distributed

    todo = CASES[:3] + CASES[-6:] if args.quick else CASES
    work = (todo, args.rows, args.hidden)
    with contextlib.redirect_stdout(io.StringIO()):
        sides = [run_distributed(measure, 8, ours, *work, timeout=580) for ours in (True, False)]
    total = args.rows * args.hidden * 4
    print(
        f"V = {args.rows} rows of {args.hidden} FP32 = {total / MIB:.2f} MiB; 4 + 4 ranks; second microbatch"
    )
    rows, ratios = [], []
    for (number, case), way in itertools.product(enumerate(todo), (0, 1)):
        ours, theirs = (summary([rank[number][way] for rank in side], total) for side in sides)
        refused = "refused" in theirs["wrong"]
        ratio = None if refused else theirs["busiest"] / ours["busiest"]
        if ratio and not case.kind:
            ratios.append(ratio)
        other = dict.fromkeys(theirs) if refused else theirs
        destination = case.destination.replace(",offset=4", "")
        rows.append(
            {
                "layouts": f"{case.source} to {destination} {case.kind}".strip(),
                "way": "back" if way else "forward",
                "bound": f"{bound_of(case, args.rows, bool(way)):.3f}",
                "ours": f"{ours['busiest']:.3f}",
                "upstream": None if refused else f"{theirs['busiest']:.3f}",
                "ratio": ratio,
                "crossing": ours["crossing"],
                "inside": ours["inside"],
                "upstream inside": other["inside"],
                "messages": ours["messages"],
                "upstream messages": other["messages"],
                "ours is": ours["wrong"],
                "upstream is": theirs["wrong"],
            }
        )
    show(rows)
    print(
        f"\nupstream's busiest rank over ours, {len(ratios)} uniform cases: {min(ratios):.2f} to "
        f"{max(ratios):.2f}, median {statistics.median_high(ratios):.2f}"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
