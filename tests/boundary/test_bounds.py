"""Plans against the lower bounds, which are computed from the two sides alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.plan import TransferPlan, make_plan, slices_of
from megatron_nemotron3.boundary.traffic import bounds, traffic
from tests.boundary.test_plan import cases


def without_leaders(plan: TransferPlan) -> TransferPlan:
    return TransferPlan(
        plan.senders, plan.receivers, plan.segments, plan.row_bytes, plan.mode, leader_bytes=0
    )


def held_by(plan: TransferPlan) -> dict[int, set[tuple[int, int]]]:
    """Rank -> rows as (sample segment, row in it), computed from the senders in the simplest way."""
    return _rows(plan, plan.senders, lambda s: (s.source_lane, s.source_start))


def wanted_by(plan: TransferPlan) -> dict[int, set[tuple[int, int]]]:
    return _rows(plan, plan.receivers, lambda s: (s.lane, s.start))


def _rows(plan: TransferPlan, side, of) -> dict[int, set[tuple[int, int]]]:
    found = {rank: set() for lane in side for group in lane for rank in group.ranks}
    for lane, groups in enumerate(side):
        names = {}  # row of the lane -> the same name on both sides
        for number, segment in enumerate(plan.segments):
            its_lane, first = of(segment)
            if its_lane == lane:
                names |= {first + r: (number, r) for r in range(segment.rows)}
        for ranks, rows in groups:
            mine = {names[r] for start, stop in rows for r in range(start, stop)}
            for rank in ranks:
                found[rank] |= mine
    return found


@settings(max_examples=80)
@given(cases())
def test_plans_meet_the_bounds(case) -> None:
    source, destination, image, plan = case
    for direction in (plan, plan.backward):
        low, moved = bounds(direction), traffic(direction)
        held, wanted = held_by(direction), wanted_by(direction)
        assert low.missing == {rank: len(rows - held.get(rank, set())) for rank, rows in wanted.items()}
        if plan.mode == "copies":
            assert moved.received == low.missing == low.entering
            assert moved.crossing == low.crossing == sum(low.missing.values())
            assert not any(moved.gathered.values())
        else:
            assert moved.crossing == low.crossing
            # What a rank receives and gathers is what it lacks, and no row twice.
            got = {rank: moved.received[rank] + moved.gathered[rank] for rank in wanted}
            assert got == low.missing
            # Also with leaders: together t - 1 times the group's rows, whoever received them first.
            for groups in direction.receivers:
                for ranks, _ in groups:
                    entered = sum(moved.received[rank] for rank in ranks)
                    gathered = sum(moved.gathered[rank] for rank in ranks)
                    assert gathered + entered == sum(low.missing[rank] for rank in ranks)
            assert (moved.busiest - low.busiest) * direction.row_bytes <= direction.leader_bytes
        equal = without_leaders(direction)
        assert bounds(equal) == low
        moved = traffic(equal)
        if plan.mode == "once":
            assert moved.busiest <= low.busiest
        else:  # every meeting of groups is cut by itself: a row more for each
            meetings = len(direction.segments) * max(len(lane) for lane in direction.receivers)
            assert all(moved.sent[rank] <= rows + meetings for rank, rows in low.leaving.items())


@settings(max_examples=50)
@given(cases())
def test_between_disjoint_modules_v_crosses(case) -> None:
    source, destination, image, plan = case
    if plan.mode == "copies":
        return
    # Replicas or disjoint slices: either way the rows cross once.
    assert traffic(plan).crossing == bounds(plan).crossing == image.sum()
    back = plan.backward
    assert traffic(back).crossing == bounds(back).crossing == image.sum()


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


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("cp", [1, 2])
def test_owner_slices_divide_by_tp_and_cp(tp: int, cp: int) -> None:
    """Rows at every position of the sequence: V / (tp * cp) to each rank, V in all, nothing gathered."""
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
        plan = without_leaders(make_plan(source, destination, [960] * samples, row_bytes=2))
        low = bounds(plan)
        assert low.busiest == traffic(plan).busiest == max(v // source.size, v // destination.size)
        moved = traffic(plan)
        # Inside the groups: (t - 1) / t of a lane's rows to each rank; (t - 1) of all rows in all.
        assert sum(moved.gathered.values()) == v * (to_tp - 1)
        if source.size > 1:
            assert set(moved.gathered.values()) == {v // to_dp * (to_tp - 1) // to_tp}


def test_shared_ranks_fetch_what_they_lack() -> None:
    """TP 2 x DP 2 to TP 4 on the same ranks, 10 rows a lane: each rank has half."""
    plan = without_leaders(make_plan(Layout.of(tp=2, dp=2), Layout.of(tp=4), [10, 10], row_bytes=2))
    low, moved = bounds(plan), traffic(plan)
    assert low.missing == moved.received == dict.fromkeys(range(4), 10)
    assert low.leaving == moved.sent == dict.fromkeys(range(4), 10)
    # Back, every rank holds all gradients and takes its own.
    back = plan.backward
    assert bounds(back).crossing == traffic(back).crossing == 0


def test_groups_share_what_a_member_holds() -> None:
    """Mode "once" on shared ranks: each rank already holds its half, nothing is sent, the group gathers."""
    plan = replace(make_plan(Layout.of(dp=2), Layout.of(tp=2), [10, 10], row_bytes=2), mode="once")
    low, moved = bounds(plan), traffic(plan)
    assert low.crossing == moved.crossing == low.busiest == 0
    assert low.missing == moved.gathered == {0: 10, 1: 10}
    # Rank 1 lacks all, but its sibling has it: that is a matter of the group, too.
    plan = replace(make_plan(Layout.of(), Layout.of(tp=2), [10], row_bytes=2), mode="once")
    assert bounds(plan).crossing == 0 and bounds(plan).missing == traffic(plan).gathered | {0: 0} == {
        0: 0,
        1: 10,
    }


def test_three_who_lack_a_row_are_served_evenly_by_two() -> None:
    """Copies are cut if that balances the senders."""
    plan = replace(make_plan(Layout.of(tp=2), Layout.of(tp=5), [60], row_bytes=2), leader_bytes=0)
    assert traffic(plan).sent == {0: 90, 1: 90}
    assert bounds(plan).leaving == {0: 90, 1: 90}
    small = make_plan(Layout.of(tp=2), Layout.of(tp=5), [60], row_bytes=2)
    assert traffic(small).sent == {0: 120, 1: 60}  # no copy is cut


@pytest.mark.parametrize(
    ("source", "destination"),
    [(Layout.of(dp=256), Layout.of(tp=8, dp=128, offset=256)), (Layout.of(dp=1024), Layout.of(tp=8, dp=128))],
    ids=["disjoint", "shared"],
)
def test_a_thousand_ranks_meet_the_bounds(source: Layout, destination: Layout) -> None:
    rows = (np.random.default_rng(0).pareto(1.2, source.dp) * 300).astype(int).tolist()
    plan = without_leaders(make_plan(source, destination, rows, row_bytes=5376))
    for direction in (plan, plan.backward):
        low, moved = bounds(direction), traffic(direction)
        assert moved.crossing == low.crossing
        assert moved.busiest <= low.busiest
    assert intervals.count(plan.receivers[0][0].rows) == sum(rows[: source.dp // 128])
