"""Random layouts and ragged rows, without processes: every row reaches exactly its owners, at the bounds.

The lower bounds are computed from the two sides alone, and positions are compared with Megatron's functions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.tensor_parallel.mappings import _split_along_first_dim
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.layout import SHARES, Layout
from megatron_nemotron3.boundary.partition import positions, sample_shares
from megatron_nemotron3.boundary.plan import TransferPlan, make_plan, slices_of
from megatron_nemotron3.boundary.traffic import bounds, describe, explain, traffic
from tests.support.boundary_reference import media_of, rows_given, rows_wanted, runs_of, unit
from tests.support.boundary_simulation import deliver
from tests.support.world import OneRank

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def cases(draw):
    """(source, destination, positions with rows [samples, length], documents of each sample, plan)."""
    tp, dp = draw(SIZES), draw(st.sampled_from([1, 2, 3, 4, 6]))
    cp, share = draw(st.sampled_from([(1, ""), (1, ""), *((n, way) for n in (2, 3) for way in SHARES)]))
    pp, sp = draw(st.sampled_from([1, 2])), draw(st.booleans())
    source = Layout.of(tp=tp, cp=cp, dp=dp, pp=pp, sp=sp, share=share)
    colocated = draw(st.booleans())
    destination = Layout.of(
        tp=draw(SIZES),
        dp=draw(st.sampled_from([1, 2, 3, 4])),
        cp=draw(st.sampled_from([1, 2])),
        pp=draw(st.sampled_from([1, 2])),
        offset=0 if colocated else source.size,
        sp=draw(st.booleans()),
    )
    destination = replace(destination, dimensions=tuple(draw(st.permutations(destination.dimensions))))
    samples = math.lcm(source.dp, destination.dp) * draw(st.integers(1, 2))
    piece = 2 * destination.cp * destination.tp
    length = piece * draw(st.integers(1, 4))
    documents = []
    if draw(st.booleans()):  # packed; some documents are empty
        borders = st.lists(st.integers(0, length // piece), max_size=3)
        documents = [(0, *(piece * b for b in sorted(draw(borders))), length) for _ in range(samples)]
    seed = draw(st.integers(0, 2**31))
    random = np.random.default_rng(seed)
    image = random.random((samples, length)) < random.choice([0.0, 0.3, 0.9], size=(samples, 1))
    image &= image.cumsum(1) <= (image.sum(1) // unit(source) * unit(source))[:, None]
    media = [media_of(source, int(n)) for n in image.sum(1)]
    rows = [int(n) for n in image.sum(1)]
    slices = None
    if destination.sliced:
        runs = [runs_of(np.flatnonzero(sample).tolist()) for sample in image]
        slices = slices_of(destination, runs, [length] * samples, documents)
    leader = draw(st.sampled_from([0, 64, 10**9]))
    plan = make_plan(source, destination, rows, row_bytes=8, slices=slices, media=media)
    return source, destination, image, documents, replace(plan, leader_bytes=leader)


@settings(max_examples=200)
@given(cases())
def test_every_row_reaches_exactly_its_owners_and_gradients_come_back(case) -> None:
    source, destination, image, documents, plan = case
    held = rows_given(source, image)
    arrived = deliver(plan, held)
    assert {rank: rows.tolist() for rank, rows in arrived.items()} == rows_wanted(
        destination, image, documents
    )
    back = deliver(plan.backward, arrived)
    assert {rank: rows.tolist() for rank, rows in back.items()} == {
        rank: rows.tolist() for rank, rows in held.items()
    }
    if plan.mode == "once":  # replicas or disjoint slices: either way the rows cross once
        assert traffic(plan).crossing == traffic(plan.backward).crossing == image.sum()
    for direction, given_rows, wanted in ((plan, held, arrived), (plan.backward, arrived, held)):
        lacking = {rank: len({*rows} - {*given_rows.get(rank, ())}) for rank, rows in wanted.items()}
        _check_bounds(direction, lacking)
        _check_text(direction)


def _check_bounds(plan: TransferPlan, lacking: dict[int, int]) -> None:
    low, moved = bounds(plan), traffic(plan)
    assert low.missing == lacking
    assert moved.crossing == low.crossing
    # What a rank receives and gathers is what it lacks, and no row twice.
    assert {rank: moved.received[rank] + moved.gathered[rank] for rank in lacking} == lacking
    equal = replace(plan, leader_bytes=0)
    assert bounds(equal) == low
    without_leaders = traffic(equal)
    if plan.mode == "copies":
        assert moved.received == low.missing == low.entering
        assert not any(moved.gathered.values())
        # Every meeting of groups is cut by itself: a row more for each.
        meetings = len(plan.segments) * max(len(lane) for lane in plan.receivers)
        assert all(without_leaders.sent[rank] <= rows + meetings for rank, rows in low.leaving.items())
    else:
        assert (moved.busiest - low.busiest) * plan.row_bytes <= plan.leader_bytes
        assert without_leaders.busiest <= low.busiest


def _check_text(plan: TransferPlan) -> None:
    """Every number that is printed comes from the plan."""
    about, low, moved = describe(plan), bounds(plan), traffic(plan)
    assert about["crossing"] == moved.crossing * 8 == sum(m["bytes"] for m in about["messages"])
    assert about["busiest_bound"] == low.busiest * 8
    assert about["local"] == sum(m.rows * 8 for m in plan.messages if m.source == m.destination)
    for rank in about["ranks"]:
        own = sum(m.rows * 8 for m in plan.receives(rank["rank"]) if m.source == rank["rank"])
        assert rank["received"] + own + rank["gathered"] == rank["wanted"]
    assert max(map(len, explain(plan).splitlines())) <= 100


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("dp=256", "tp=8,dp=128,offset=256"),
        ("tp=4,dp=30", "tp=8,dp=100,offset=500"),
        ("tp=1", "tp=8,dp=125,offset=500"),
        ("dp=1024", "tp=8,dp=128"),
    ],
)
def test_a_thousand_ranks(source: str, destination: str) -> None:
    a, b = Layout.parse(source), Layout.parse(destination)
    samples = math.lcm(a.dp, b.dp)
    rows = (np.random.default_rng(0).pareto(1.2, samples) * 3).astype(int).tolist()
    plan = replace(make_plan(a, b, rows, row_bytes=2), leader_bytes=0)
    ends = np.cumsum([0, *rows])

    def of(layout: Layout) -> dict[int, list[int]]:
        return {
            rank: list(range(ends[mine[0]], ends[mine[-1] + 1]))
            for mine, ranks in zip(sample_shares(samples, layout.dp), layout.lanes(0), strict=True)
            for rank in ranks
        }

    arrived = deliver(plan, {rank: np.array(rows, int) for rank, rows in of(a).items()})
    assert {rank: rows.tolist() for rank, rows in arrived.items()} == of(b)
    back = deliver(plan.backward, arrived)
    assert {rank: rows.tolist() for rank, rows in back.items()} == of(a)
    for direction in (plan, plan.backward):
        assert traffic(direction).crossing == bounds(direction).crossing
        assert traffic(direction).busiest <= bounds(direction).busiest
    # A chain of contiguous parts meets another: at most as many messages as there are parts.
    assert plan.mode == "copies" or len(plan.messages) < a.size + b.size


def flat(plan: TransferPlan) -> list[tuple[int, int, int, int, int]]:
    return [(m.source, m.destination, *piece) for m in plan.messages for piece in m.pieces]


#: By hand: layouts, rows of the samples, (sender, receiver, from place, to place, rows).
BY_HAND = {
    "four ranks each": (
        "tp=2,dp=2",
        "tp=4,offset=4",
        [4] * 4,
        [(0, 4, 0, 0, 4), (1, 5, 4, 4, 4), (2, 6, 0, 8, 4), (3, 7, 4, 12, 4)],
    ),
    "fan-in, a lane without rows": (
        *("dp=4", "tp=4,offset=4", [7, 1, 0, 8]),
        [(0, 4, 0, 0, 4), (0, 5, 4, 4, 3), (1, 5, 0, 7, 1), (3, 6, 0, 8, 4), (3, 7, 4, 12, 4)],
    ),
    "DP 3 to 2": (
        *("dp=3", "tp=2,dp=2,offset=3", [1, 2, 3, 4, 5, 6]),
        [(0, 3, 0, 0, 3), (1, 4, 0, 3, 3), (1, 5, 3, 0, 4), (2, 5, 0, 4, 4), (2, 6, 4, 8, 7)],
    ),
    "a source with its rows in shards": (
        *("tp=2,sp", "dp=2,offset=2", [3, 1]),
        [(0, 2, 0, 0, 2), (1, 2, 0, 2, 1), (1, 3, 1, 0, 1)],
    ),
    "one receiver: leaders send": ("tp=2,dp=2", "offset=4,tp=1", [5, 3], [(0, 4, 0, 0, 5), (2, 4, 0, 5, 3)]),
    "context ranks with chunks of each medium": (
        *("cp=2,share=zigzag", "tp=2,offset=2", [8, 4]),
        [
            *[(0, 2, 0, 0, 2), (0, 3, 2, 6, 3), (0, 3, 5, 11, 1)],
            *[(1, 2, 0, 2, 4), (1, 3, 4, 9, 2)],
        ],
    ),
    "from the last stage to the first": ("pp=2", "pp=2,offset=2", [3], [(1, 2, 0, 0, 3)]),
    "shared ranks: what a rank has, it keeps": (
        *("tp=2,dp=2", "tp=4", [2, 1]),
        [
            *[(0, 0, 0, 0, 2), (0, 2, 0, 0, 2), (1, 1, 0, 0, 2), (1, 3, 0, 0, 2)],
            *[(2, 0, 0, 2, 1), (2, 2, 0, 2, 1), (3, 1, 0, 2, 1), (3, 3, 0, 2, 1)],
        ],
    ),
    "an encoder on some of the ranks": (
        *("dp=2", "dp=4", [1, 2, 3, 4]),
        [(0, 0, 0, 0, 1), (0, 1, 1, 0, 2), (1, 2, 0, 0, 3), (1, 3, 3, 0, 4)],
    ),
    "no rows at all": ("dp=2", "tp=2,offset=2", [0, 0], []),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    source, destination, rows, messages = BY_HAND[name]
    # 64 bytes of leader path: two rows of 32.
    plan = replace(
        make_plan(Layout.parse(source), Layout.parse(destination), rows, row_bytes=32), leader_bytes=64
    )
    assert sorted(flat(plan)) == sorted(messages)


def test_plans_are_hashable_and_equal_ones_are_equal() -> None:
    def plan() -> TransferPlan:
        return make_plan(Layout.of(dp=2), Layout.of(tp=2, offset=2), [3, 4], row_bytes=2)

    a, b = plan(), plan()
    assert a.messages and {a: 1}[b] == 1  # also once one of them has worked something out
    assert a != a.backward and a.backward.backward == a


def test_sides_that_disagree_are_refused() -> None:
    """Wants for two rows, where the samples have three."""
    slices = [[((0, 1),), ((1, 2),)]]
    plan = make_plan(Layout.of(), Layout.of(tp=2, sp=True, offset=1), [1], row_bytes=2, slices=slices)
    with pytest.raises(ValueError, match=r"1 rows wanted, \[0\] arrive: both sides must count the rows"):
        _ = plan.messages


@pytest.mark.parametrize(
    ("source", "destination", "rows", "message"),
    [
        ("cp=2", "offset=2,dp=1", [1], "has CP=2: say how its context ranks share the rows"),
        ("cp=2,share=contiguous", "offset=2,dp=1", [3], "3 rows of a source lane do not divide among CP=2"),
        ("cp=2,share=zigzag", "offset=2,dp=1", [6], "a sequence of 6 does not divide into 2 . CP = 4 chunks"),
        (
            "tp=2,cp=2,share=media,sp",
            "offset=4,dp=1",
            [3],
            "3 rows of a source lane do not divide among TP=2",
        ),
        ("dp=2", "offset=2,cp=2", [1, 1], "depend on their positions"),
        ("dp=2", "offset=2,dp=3", [1] * 4, "4 samples of a microbatch do not divide among 3 data lanes"),
        ("tp=2,sp", "offset=2,dp=1", [3], "3 rows of a source lane do not divide among TP=2"),
        ("dp=1", "offset=1,dp=1", [-1], "counts start at 0"),
    ],
)
def test_what_cannot_cross(source: str, destination: str, rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(Layout.parse(source), Layout.parse(destination), rows, row_bytes=2)


def test_a_few_bytes_go_from_leader_to_leader() -> None:
    """Two groups of 8 with each other: one message up to 64 KiB, which is the chunk above the bound."""
    for rows, messages in ((1, 1), (12, 1), (13, 7), (800, 8)):
        plan = make_plan(Layout.of(tp=8), Layout.of(tp=8, offset=8), [rows], row_bytes=5376)
        assert len(plan.messages) == messages
        excess = traffic(plan).busiest - bounds(plan).busiest
        assert 0 <= excess * plan.row_bytes <= plan.leader_bytes
        assert (excess > 0) == (1 < rows < 13)
    # With a third party, equal parts need no more messages; not where only one side meets a single group.
    plan = make_plan(Layout.of(tp=2, dp=2), Layout.of(tp=4, offset=4), [2] * 2, row_bytes=5376)
    assert [(m.source, m.destination) for m in plan.messages] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    plan = make_plan(Layout.of(dp=4), Layout.of(tp=4, offset=4), [1] * 4, row_bytes=5376)
    assert [(m.source, m.destination) for m in plan.messages] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_one_sender_needs_one_receiver() -> None:
    """A single rank sends everything in one message, whatever the size, and receives it so in backward."""
    plan = make_plan(Layout.of(), Layout.of(tp=8, offset=1), [10_000], row_bytes=5376)
    for way in (plan, plan.backward):
        assert len(way.messages) == 1
        assert traffic(way).busiest == bounds(way).busiest == 10_000
    assert plan.gather(5) == (tuple(range(1, 9)), 10_000, 10_000)  # a broadcast
    # Every rank but the leader receives all rows; together it is t - 1 times the rows, as with equal parts.
    assert traffic(plan).gathered == {1: 0} | dict.fromkeys(range(2, 9), 10_000)


def test_owner_slices_divide_by_tp_and_cp() -> None:
    """Rows at every position of the sequence: V / (tp * cp) to each rank, V in all, nothing gathered."""
    for tp, cp in ((2, 1), (8, 1), (4, 2)):
        length = 64 * tp * cp
        source, destination = Layout.of(dp=2), Layout.of(tp=tp, cp=cp, sp=True, offset=2)
        slices = slices_of(destination, [((0, length),)] * 2, [length] * 2)
        plan = make_plan(source, destination, [length] * 2, row_bytes=2, slices=slices)
        low, moved = bounds(plan), traffic(plan)
        assert low.crossing == moved.crossing == 2 * length
        assert set(moved.received.values()) == set(low.entering.values()) == {2 * length // (tp * cp)}
        assert not any(moved.gathered.values())


def test_balanced_layouts_have_the_bound_of_the_shares() -> None:
    """max(V / |S|, V / |D|), and (t - 1) / t of a lane's rows inside its group."""
    for (tp, dp), (to_tp, to_dp) in [((1, 4), (4, 1)), ((2, 8), (8, 2)), ((8, 2), (1, 4)), ((1, 1), (4, 2))]:
        source, destination = Layout.of(tp=tp, dp=dp), Layout.of(tp=to_tp, dp=to_dp, offset=64)
        samples = math.lcm(dp, to_dp)
        v = samples * 960
        plan = replace(make_plan(source, destination, [960] * samples, row_bytes=2), leader_bytes=0)
        low = bounds(plan)
        assert low.busiest == traffic(plan).busiest == max(v // source.size, v // destination.size)
        moved = traffic(plan)
        # Inside the groups: (t - 1) / t of a lane's rows to each rank; (t - 1) of all rows in all.
        assert sum(moved.gathered.values()) == v * (to_tp - 1)
        if source.size > 1:
            assert set(moved.gathered.values()) == {v // to_dp * (to_tp - 1) // to_tp}


def test_three_who_lack_a_row_are_served_evenly_by_two() -> None:
    """Copies are cut if that balances the senders."""
    plan = replace(make_plan(Layout.of(tp=2), Layout.of(tp=5), [60], row_bytes=2), leader_bytes=0)
    assert traffic(plan).sent == {0: 90, 1: 90}
    assert bounds(plan).leaving == {0: 90, 1: 90}
    small = make_plan(Layout.of(tp=2), Layout.of(tp=5), [60], row_bytes=2)
    assert traffic(small).sent == {0: 120, 1: 60}  # no copy is cut


def megatrons(length: int, cp: int, tp: int, c: int, t: int, sequence_parallel: bool) -> list[int]:
    """Positions that Megatron's own functions give to a rank."""
    group = OneRank(cp, c)
    with (
        mock.patch("torch.distributed.get_world_size", lambda g=None: g.size()),
        mock.patch("torch.distributed.get_rank", lambda g=None: g.rank()),
    ):
        batch = get_batch_on_this_cp_rank({"tokens": torch.arange(length)[None]}, False, cp_group=group)
    mine = batch["tokens"][0]
    return (_split_along_first_dim(mine, OneRank(tp, t)) if sequence_parallel else mine).tolist()


def test_positions_are_megatrons() -> None:
    for cp, tp, sequence_parallel in itertools.product((1, 2, 3, 4), (1, 2, 4), (False, True)):
        length = 2 * cp * tp * 6
        ours = positions(length, cp, tp, sequence_parallel=sequence_parallel)
        for c, t in itertools.product(range(cp), range(tp)):
            mine = [p for start, stop in ours[c * tp + t] for p in range(start, stop)]
            assert mine == megatrons(length, cp, tp, c, t, sequence_parallel)


def test_a_lane_without_samples_wants_nothing() -> None:
    layout = Layout.of(tp=2, cp=2, dp=2, sp=True)
    slices = slices_of(layout, [((0, 8),), ()], [8, 8])
    assert [sum(map(intervals.count, mine)) for mine in slices] == [8, 0]
    assert [len(mine) for mine in slices] == [4, 4]
    assert slices_of(layout, [], []) == (((),) * 4,) * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 2, 1), "a sequence of 10 does not divide into 2 . CP = 4 chunks: pad it to a multiple of 4"),
        ((12, 1, 8), "12 positions of a context rank do not divide among TP=8 .* a multiple of 8"),
        ((12, 2, 4), r"6 positions of a context rank do not divide among TP=4 .* a multiple of 16"),
    ],
)
def test_lengths_that_do_not_divide(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        positions(*arguments, sequence_parallel=True)


def test_wrong_documents_and_runs() -> None:
    for documents in ((0, 4), (4, 8), (0, 6, 4, 8)):
        with pytest.raises(ValueError, match="do not cover a sequence of 8"):
            positions(8, 1, 1, sequence_parallel=False, documents=documents)
    layout = Layout.of(cp=2)
    for runs in (((0, 3), (2, 2)), ((4, 2), (0, 2))):
        with pytest.raises(ValueError, match="overlap or do not ascend"):
            slices_of(layout, [runs], [8])
    with pytest.raises(ValueError, match="sample 0: a row at position 8 of a sequence of 8"):
        slices_of(layout, [((7, 2),)], [8])
