"""A feed describes batches ahead without consuming them."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.boundary.feed import Microbatch, RowFeed, describe_ids, tokens

IDS = [[5, 7, 7, 5, 8, 7], [5, 5, 5, 5, 5, 5], [8, 8, 8, 8, 7, 7]]
SPECIAL = {"images": 7, "audio": 8}


@pytest.mark.parametrize(
    "make", [torch.tensor, lambda ids: torch.tensor(ids).numpy()], ids=["tensor", "array"]
)
def test_runs_and_counts_from_ids(make):
    found = describe_ids(make(IDS), SPECIAL)
    assert found.rows_of("images") == (3, 0, 2)
    assert found.rows_of("audio") == (1, 0, 4)
    assert found.runs_of("images") == (((1, 2), (5, 1)), (), ((4, 2),))
    assert found.runs_of("audio") == (((4, 1),), (), ((0, 4),))
    assert found.lengths == (6, 6, 6)
    assert hash(found) == hash(describe_ids(make(IDS), SPECIAL))


def test_reading_ahead_takes_nothing_away():
    batches = [{"ids": torch.tensor(IDS) + i, "documents": [(0, 6)] * 3} for i in range(4)]
    feed = RowFeed(iter(batches), tokens("ids", SPECIAL, "documents"))
    assert feed.at(2).rows_of("images") == (2, 6, 0)
    assert feed.at(0).documents == ((0, 6),) * 3
    drawn = []
    for batch in feed:
        drawn.append(batch)
        assert feed.current == feed.at(len(drawn) - 1)
    assert [a is b for a, b in zip(drawn, batches, strict=True)] == [True] * 4
    with pytest.raises(StopIteration):
        feed.at(4)


def test_batches_that_nobody_takes_are_not_kept():
    feed = RowFeed(([i] for i in range(5)), lambda n: Microbatch.of({"images": n}), consumed=False)
    assert feed.at(3).rows_of("images") == (3,)
    assert not feed._ahead
    assert next(feed) is None and feed.current.rows_of("images") == (0,)


def test_old_descriptions_are_forgotten():
    feed = RowFeed(([i] for i in range(RowFeed.KEPT + 5)), lambda n: Microbatch.of({"images": n}))
    feed.at(RowFeed.KEPT + 4)
    assert len(feed._known) == RowFeed.KEPT
    with pytest.raises(KeyError):
        feed.at(0)
