"""Row counts of shares, and the errors that all ranks derive from the same headers."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.boundary.agreement import Announcement, _agreement, _Header, share_counts

LANES = ((0, 1), (2, 3))


def test_counts_of_shares():
    assert share_counts(7, 1, [3, 3], uneven=False) == (7,)
    assert share_counts(6, 2, [0, 3, 1, 2], uneven=False) == (3, 3)
    assert share_counts(6, 3, None, uneven=False) == (2, 2, 2)
    assert share_counts(7, 3, None, uneven=True) == tuple(len(t) for t in torch.arange(7).tensor_split(3))
    for rows, slots, sizes in [(7, 3, None), (6, 2, [1, 2, 3]), (6, 2, [2, 2])]:
        with pytest.raises(ValueError, match="_mimo_bridge_split_sizes"):
            share_counts(rows, slots, sizes, uneven=False)


def announced(**changes):
    return Announcement("images -> language", LANES, 1, None, None)._replace(**changes)


def headers(*changes):
    same = _Header(True, 0, (4,), -1, -1, (5,))
    return {rank: same._replace(**change) for rank, change in enumerate(changes)}


def test_lanes_have_their_own_counts():
    found = _agreement(announced(), headers({}, {}, {"counts": (9,)}, {"counts": (9,)}))
    assert found[:3] == ((5, 9), (4,), torch.float32)


def test_parts_of_a_lane_add_up():
    found = _agreement(announced(sharded=True), headers({}, {"counts": (6,)}, {}, {}))
    assert found.counts == (11, 10)


def test_nobody_has_rows():
    found = _agreement(announced(), headers(*[{"present": False, "row": (), "counts": (0,)}] * 4))
    assert found[:3] == ((0, 0), None, None)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            [{}, {}, {"dtype": 1}, {"dtype": 1}],
            r"ranks \[0, 1\] have the dtype torch.float32; ranks \[2, 3\]",
        ),
        ([{}, {}, {"row": (6,)}, {"row": (6,)}], r"rows of the shape \(4,\)"),
        ([{}, {"counts": (6,)}, {}, {}], r"ranks \[0\] have rows in numbers \(5,\); ranks \[1\]"),
        ([{}, {}, {}, {"digest": 3, "total": 8}], r"ranks \[3\] describe the microbatch with 8 rows"),
    ],
)
def test_differences_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        _agreement(announced(), headers(*changes))
