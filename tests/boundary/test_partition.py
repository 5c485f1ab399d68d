"""Positions of ranks against Megatron's functions, and packed documents against a second implementation."""

from __future__ import annotations

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
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import positions, rows_at, sample_shares
from megatron_nemotron3.boundary.plan import make_plan, slices_of
from tests.support.boundary_reference import runs_of
from tests.support.boundary_simulation import deliver


def flat(rows: intervals.Intervals) -> list[int]:
    return [row for start, stop in rows for row in range(start, stop)]


class Place:
    """A stand-in for a process group."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def megatrons(length: int, cp: int, tp: int, c: int, t: int, sequence_parallel: bool) -> list[int]:
    """Positions that Megatron's own functions give to a rank."""
    group = Place(cp, c)
    with (
        mock.patch("torch.distributed.get_world_size", lambda g=None: g.size()),
        mock.patch("torch.distributed.get_rank", lambda g=None: g.rank()),
    ):
        batch = get_batch_on_this_cp_rank({"tokens": torch.arange(length)[None]}, False, cp_group=group)
    mine = batch["tokens"][0]
    return (_split_along_first_dim(mine, Place(tp, t)) if sequence_parallel else mine).tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_positions_are_megatrons(cp: int, tp: int, sequence_parallel: bool) -> None:
    length = 2 * cp * tp * 6
    ours = positions(length, cp, tp, sequence_parallel=sequence_parallel)
    for c in range(cp):
        for t in range(tp):
            assert flat(ours[c * tp + t]) == megatrons(length, cp, tp, c, t, sequence_parallel)


def packed(bounds: list[int], cp: int, c: int) -> list[int]:
    """Positions of a context rank of packed documents, chunk by chunk."""
    mine: list[int] = []
    for first, last in zip(bounds, bounds[1:]):
        chunks = np.array_split(np.arange(first, last), 2 * cp)
        mine += [*chunks[c], *chunks[2 * cp - 1 - c]] if cp > 1 else [*range(first, last)]
    return [int(p) for p in mine]


DOCUMENTS = st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(sum)


@settings(max_examples=100)
@given(DOCUMENTS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_packed_documents(sizes: list[int], cp: int, tp: int) -> None:
    """Every document in 2 * cp chunks of its own, then tp parts of a rank's positions; empty ones too."""
    bounds = [int(b) for b in np.cumsum([0, *(size * 2 * cp * tp for size in sizes)])]
    ours = positions(bounds[-1], cp, tp, sequence_parallel=True, documents=tuple(bounds))
    for c in range(cp):
        mine = packed(bounds, cp, c)
        share = len(mine) // tp
        assert [flat(part) for part in ours[c * tp : (c + 1) * tp]] == [
            mine[t * share : (t + 1) * share] for t in range(tp)
        ]
    plain = positions(bounds[-1], cp, tp, sequence_parallel=False, documents=tuple(bounds))
    assert [flat(rows) for rows in plain] == [packed(bounds, cp, c) for c in range(cp) for _ in range(tp)]


@settings(max_examples=60)
@given(st.data())
def test_rows_of_packed_documents_reach_their_owners(data) -> None:
    source = Layout.of(tp=data.draw(st.sampled_from([1, 2])), dp=data.draw(st.sampled_from([1, 2, 3])))
    destination = Layout.of(
        tp=data.draw(st.sampled_from([1, 2])),
        cp=data.draw(st.sampled_from([1, 2])),
        dp=data.draw(st.sampled_from([1, 2])),
        sp=data.draw(st.booleans()),
        offset=data.draw(st.sampled_from([0, source.size])),
    )
    samples = 6
    unit = 2 * destination.cp * destination.tp
    bounds = [np.cumsum([0, *data.draw(DOCUMENTS)]) * unit for _ in range(samples)]
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    image = [random.random(b[-1]) < random.choice([0.0, 0.5, 1.0]) for b in bounds]
    number = np.split(np.arange(sum(i.sum() for i in image)), np.cumsum([i.sum() for i in image])[:-1])
    slices = None
    if destination.sliced:
        slices = slices_of(
            destination,
            [runs_of(np.flatnonzero(i).tolist()) for i in image],
            [len(i) for i in image],
            documents=[tuple(map(int, b)) for b in bounds],
        )
    plan = replace(
        make_plan(source, destination, [int(i.sum()) for i in image], row_bytes=2, slices=slices),
        leader_bytes=0,
    )
    held = {
        rank: np.concatenate([number[s] for s in mine])
        for mine, ranks in zip(sample_shares(samples, source.dp), source.lanes(0))
        for rank in ranks
    }
    arrived = deliver(plan, held)
    for mine, ranks in zip(sample_shares(samples, destination.dp), destination.lanes(0)):
        for index, rank in enumerate(ranks):
            c, t = divmod(index, destination.tp)
            want = []
            for s in mine:
                own = packed(list(bounds[s]), destination.cp, c)
                if destination.sequence_parallel:
                    own = np.array_split(own, destination.tp)[t].tolist()
                at = dict(zip(np.flatnonzero(image[s]), number[s]))
                want += [at[p] for p in own if p in at]
            assert arrived[rank].tolist() == want
    back = deliver(plan.backward, arrived)
    assert {rank: rows.tolist() for rank, rows in back.items()} == {r: h.tolist() for r, h in held.items()}


def test_by_hand() -> None:
    """CP 2 of 8 positions: rank 0 has 0, 1, 6, 7. Images at 1-5 and, in a second sample, at 0-1 and 6."""
    owned = [positions(8, 2, 1, sequence_parallel=False)] * 2
    assert owned[0] == (((0, 2), (6, 8)), ((2, 6),))
    assert rows_at([((1, 5),), ((0, 2), (6, 1))], owned) == (((0, 1), (5, 8)), ((1, 5),))
    assert rows_at([(), ()], owned) == ((), ())
    assert rows_at([], []) == ()


def test_runs() -> None:
    assert runs_of([3, 4, 5, 9, 11, 12]) == ((3, 3), (9, 1), (11, 2))
    assert runs_of([]) == ()


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


SETS = (
    st.sets(st.integers(0, 30))
    .map(lambda rows: runs_of(sorted(rows)))
    .map(lambda runs: tuple((first, first + n) for first, n in runs))
)


@given(SETS, SETS, st.integers(0, 32), st.integers(0, 32), st.integers(1, 5))
def test_sets_of_rows(a, b, first: int, last: int, number: int) -> None:
    rows = flat(a)
    assert intervals.union([*a, *b]) == intervals.union([*b, *a])
    assert flat(intervals.union([*a, *b])) == sorted({*rows} | {*flat(b)})
    assert flat(intervals.at_places(first, last, a)) == rows[first:last]
    clipped = intervals.IntervalIndex(a).clip(first, last)
    assert [r for _, start, stop in clipped for r in range(start, stop)] == [
        r for r in rows if first <= r < last
    ]
    assert all(rows[place] == start for place, start, _ in clipped)
    size = -(-len(rows) // number)
    cut = [flat(part) for part in intervals.parts(a, number)]
    assert cut == [rows[i * size : (i + 1) * size] for i in range(number)]
