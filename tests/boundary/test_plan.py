"""Random layouts and ragged rows, without processes: every row reaches exactly its owners."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.layout import SHARES, Layout
from megatron_nemotron3.boundary.partition import lane_rows, sample_shares, segments
from megatron_nemotron3.boundary.plan import TransferPlan, groups_of, make_plan, sender_groups, slices_of
from tests.support.boundary_reference import media_of, of_context, runs_of, unit, zigzag
from tests.support.boundary_simulation import deliver

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def cases(draw):
    """(source, destination, ids [samples, length], plan, destination slices or None)."""
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
    length = 2 * destination.cp * destination.tp * draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**31))
    random = np.random.default_rng(seed)
    image = random.random((samples, length)) < random.choice([0.0, 0.3, 0.9], size=(samples, 1))
    image &= image.cumsum(1) <= (image.sum(1) // unit(source) * unit(source))[:, None]
    media = [media_of(source, int(n)) for n in image.sum(1)]
    rows = [int(n) for n in image.sum(1)]
    slices = None
    if destination.sliced:
        runs = [runs_of(np.flatnonzero(sample).tolist()) for sample in image]
        slices = slices_of(destination, runs, [length] * samples)
    leader = draw(st.sampled_from([0, 64, 10**9]))
    plan = make_plan(source, destination, rows, row_bytes=8, slices=slices, media=media)
    return source, destination, image, replace(plan, leader_bytes=leader)


def expected(layout: Layout, image: np.ndarray, number: np.ndarray) -> dict[int, list[int]]:
    """Row numbers that each first-stage rank must have, sample by sample, position by position."""
    found = {}
    samples = sample_shares(len(image), layout.dp)
    for lane, ranks in enumerate(layout.lanes(0)):
        for index, rank in enumerate(ranks):
            c, t = divmod(index, layout.tp)
            mine = zigzag(image.shape[1], layout.cp, c)
            if layout.sequence_parallel:
                share = len(mine) // layout.tp
                mine = mine[t * share : (t + 1) * share]
            found[rank] = [int(number[s, p]) for s in samples[lane] for p in mine if image[s, p]]
    return found


@settings(max_examples=200)
@given(cases())
def test_every_row_reaches_exactly_its_owners_and_gradients_come_back(case) -> None:
    source, destination, image, plan = case
    number = np.where(image, image.cumsum().reshape(image.shape) - 1, -1)  # sample-major, position order
    held = places_held(source, image)
    arrived = deliver(plan, held)
    want = expected(destination, image, number)
    assert {rank: rows.tolist() for rank, rows in arrived.items()} == want
    back = deliver(plan.backward, arrived)
    assert {rank: rows.tolist() for rank, rows in back.items()} == {
        r: rows.tolist() for r, rows in held.items()
    }


@settings(max_examples=100)
@given(cases())
def test_between_disjoint_modules_each_row_goes_once_and_no_rank_carries_more_than_its_part(case) -> None:
    source, destination, image, plan = case
    if plan.mode != "once":
        return
    plan = TransferPlan(plan.senders, plan.receivers, plan.segments, plan.row_bytes, "once", leader_bytes=0)
    for direction in (plan, plan.backward):
        groups = [g for side in (direction.senders, direction.receivers) for lane in side for g in lane]
        part = max(math.ceil(intervals.count(group.rows) / len(group.ranks)) for group in groups)
        for rank in {rank for group in groups for rank in group.ranks}:
            for messages in (direction.sends(rank), direction.receives(rank)):
                assert sum(message.rows for message in messages) <= part
        wanted = sum(intervals.count(group.rows) for lane in direction.receivers for group in lane)
        assert sum(message.rows for message in direction.messages) == wanted
    if not destination.sliced or destination.sequence_parallel:
        assert sum(message.rows for message in plan.messages) == image.sum()


@pytest.mark.parametrize(
    ("source", "destination"), [((1, 256), (8, 96)), ((4, 30), (8, 100)), ((1, 1), (8, 125))]
)
def test_a_thousand_ranks(source, destination) -> None:
    a, b = Layout.of(tp=source[0], dp=source[1]), Layout.of(tp=destination[0], dp=destination[1], offset=500)
    samples = math.lcm(a.dp, b.dp)
    rows = (np.random.default_rng(0).pareto(1.2, samples) * 3).astype(int).tolist()
    plan = replace(make_plan(a, b, rows, row_bytes=2), leader_bytes=0)
    number = np.arange(sum(rows))
    ends = np.cumsum([0, *rows])

    def of(layout: Layout) -> dict[int, list[int]]:
        return {
            rank: number[ends[mine[0]] : ends[mine[-1] + 1]].tolist()
            for mine, ranks in zip(sample_shares(samples, layout.dp), layout.lanes(0), strict=True)
            for rank in ranks
        }

    arrived = deliver(plan, {rank: np.array(rows, int) for rank, rows in of(a).items()})
    assert {rank: rows.tolist() for rank, rows in arrived.items()} == of(b)
    back = deliver(plan.backward, arrived)
    assert {rank: rows.tolist() for rank, rows in back.items()} == of(a)
    # A chain of contiguous parts meets another: at most as many messages as there are parts.
    assert len(plan.messages) < a.size + b.size


#: Bits are compared, so any two bytes stand for bfloat16 and any byte for FP8.
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "fp8": np.uint8}


@settings(max_examples=60)
@given(cases(), st.sampled_from(sorted(DTYPES)), st.integers(0, 2**31))
def test_values_equal_the_concatenation_bit_for_bit(case, dtype: str, seed: int) -> None:
    """Any bits, NaN and -0 too: the microbatch's rows concatenated, and every rank's share of that."""
    source, destination, image, plan = case
    kind = np.dtype(DTYPES[dtype])
    total = np.random.default_rng(seed).bytes(int(image.sum()) * 3 * kind.itemsize)
    reference = np.frombuffer(total, kind).reshape(-1, 3)
    held = {rank: reference[places] for rank, places in places_held(source, image).items()}
    number = np.where(image, image.cumsum().reshape(image.shape) - 1, -1)
    want = {rank: reference[places] for rank, places in expected(destination, image, number).items()}
    arrived = deliver(plan, held)
    assert arrived.keys() == want.keys()
    assert all(rows.tobytes() == want[rank].tobytes() for rank, rows in arrived.items())
    back = deliver(plan.backward, arrived)
    assert all(rows.tobytes() == held[rank].tobytes() for rank, rows in back.items())


def places_held(source: Layout, image: np.ndarray) -> dict[int, np.ndarray]:
    """Row numbers that each last-stage rank has."""
    ends = np.cumsum([0, *image.sum(1)])
    found = {}
    for mine, ranks in zip(sample_shares(len(image), source.dp), source.lanes(source.pp - 1), strict=True):
        rows = np.arange(ends[mine[0]], ends[mine[-1] + 1])
        media = [n for sample in mine for n in media_of(source, int(image[sample].sum()))]
        for c in range(source.cp):
            part = rows[of_context(source, media, c)]
            parts = np.split(part, source.tp) if source.sequence_parallel else [part] * source.tp
            found |= dict(zip(ranks[c * source.tp : (c + 1) * source.tp], parts, strict=True))
    return found


#: (tp, dp) of ranks 0-3 and of ranks 4-7, four samples of 4 rows: (sender, receiver, from place, to place)
#: of messages of 4 rows each, written by hand.
EXPECTED = {
    ((1, 4), (4, 1)): [(0, 4, 0, 0), (1, 5, 0, 4), (2, 6, 0, 8), (3, 7, 0, 12)],
    ((1, 4), (2, 2)): [(0, 4, 0, 0), (1, 5, 0, 4), (2, 6, 0, 0), (3, 7, 0, 4)],
    ((2, 2), (4, 1)): [(0, 4, 0, 0), (1, 5, 4, 4), (2, 6, 0, 8), (3, 7, 4, 12)],
    ((2, 2), (2, 2)): [(0, 4, 0, 0), (1, 5, 4, 4), (2, 6, 0, 0), (3, 7, 4, 4)],
    ((4, 1), (4, 1)): [(0, 4, 0, 0), (1, 5, 4, 4), (2, 6, 8, 8), (3, 7, 12, 12)],
    ((4, 1), (2, 2)): [(0, 4, 0, 0), (1, 5, 4, 4), (2, 6, 8, 0), (3, 7, 12, 4)],
    ((4, 1), (1, 4)): [(0, 4, 0, 0), (1, 5, 4, 0), (2, 6, 8, 0), (3, 7, 12, 0)],
}
GATHERS = {(4, 1): {(4, 5, 6, 7)}, (2, 2): {(4, 5), (6, 7)}, (1, 4): set()}


def flat(plan: TransferPlan) -> list[tuple[int, int, int, int, int]]:
    return [(m.source, m.destination, *piece) for m in plan.messages for piece in m.pieces]


@pytest.mark.parametrize(("source", "destination"), EXPECTED)
def test_four_and_four_ranks(source, destination) -> None:
    a, b = (Layout.of(tp=tp, dp=dp, offset=4 * i) for i, (tp, dp) in enumerate((source, destination)))
    plan = replace(make_plan(a, b, [4] * 4, row_bytes=5376), leader_bytes=0)
    assert flat(plan) == [(*message, 4) for message in EXPECTED[source, destination]]
    assert {gather.ranks for gather in plan.gathers} == GATHERS[destination]
    assert {gather.part for gather in plan.gathers} <= {4}
    back = plan.backward
    assert flat(back) == [(t, s, j, i, 4) for s, t, i, j in EXPECTED[source, destination]]
    assert {gather.ranks for gather in back.gathers} == {
        tuple(rank - 4 for rank in ranks) for ranks in GATHERS[source]
    }


#: By hand: layouts, rows of the samples, (sender, receiver, from place, to place, rows).
RAGGED = {
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


@pytest.mark.parametrize("name", RAGGED)
def test_by_hand(name: str) -> None:
    source, destination, rows, messages = RAGGED[name]
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


def test_samples_need_not_lie_in_equal_shares() -> None:
    """Two lanes own samples (0, 3, 1) and (2); the other side 0 to 3 in order."""
    rows, sent, taken = [1, 2, 3, 4], [(0, 3, 1), (2,)], sample_shares(4, 1)
    plan = TransferPlan(
        sender_groups(Layout.of(dp=2), lane_rows(rows, sent)),
        groups_of(Layout.of(offset=2), 0, lane_rows(rows, taken)),
        segments(rows, sent, taken),
        row_bytes=2,
    )
    assert flat(plan) == [(0, 2, 0, 0, 1), (0, 2, 5, 1, 2), (0, 2, 1, 6, 4), (1, 2, 0, 3, 3)]
    with pytest.raises(
        ValueError, match=r"source lanes own samples \[0, 0\]: each of 0..1 must be owned once"
    ):
        segments([1, 1], [(0,), (0,)], sample_shares(2, 1))
