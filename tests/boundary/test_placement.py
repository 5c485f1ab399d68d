"""Places of text and modalities, without processes."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.boundary.decoder_input import assemble, kinds_of_ids, kinds_of_runs, make_placement
from megatron_nemotron3.boundary.feed import describe_ids
from megatron_nemotron3.boundary.partition import positions

TOKENS = {"vision": 98, "audio": 99}


def ids() -> torch.Tensor:
    """[3, 16]: one sample all image, one mixed, one all text."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randint(0, 90, (3, 16), generator=generator)
    made[0] = 98
    made[1, 2:7] = 98
    made[1, 9:10] = 99
    made[1, 12:] = 99
    return made


@pytest.mark.parametrize("by_runs", [True, False])
@pytest.mark.parametrize(
    ("cp", "tp", "sp"), [(1, 1, False), (2, 1, False), (1, 4, True), (2, 2, True), (2, 2, False)]
)
def test_every_rank_builds_its_slice_of_what_one_rank_builds(
    by_runs: bool, cp: int, tp: int, sp: bool
) -> None:
    tokens = ids()
    batch, length = tokens.shape
    known = describe_ids(tokens, TOKENS)
    if by_runs:
        kinds = kinds_of_runs({name: known.runs_of(name) for name in TOKENS}, length)  # type: ignore[misc]
    else:
        kinds = kinds_of_ids(tokens, TOKENS)
    rows = {name: torch.randn(int((tokens == t).sum()), 4, dtype=torch.float64) for name, t in TOKENS.items()}
    table = torch.randn(90, 4, dtype=torch.float64)
    whole = torch.zeros(length, batch, 4, dtype=torch.float64)
    at = {name: iter(rows[name]) for name in TOKENS}
    for sample in range(batch):
        for place in range(length):
            token = int(tokens[sample, place])
            name = {98: "vision", 99: "audio"}.get(token)
            whole[place, sample] = next(at[name]) if name else table[token]
    owners = positions(length, cp, tp, sequence_parallel=sp)
    for rank, mine in enumerate(owners):
        first, own = (rank // tp * tp, rank % tp) if sp else (rank, 0)
        owned = [[owners[first + t]] * batch for t in range(tp if sp else 1)]
        placed = make_placement(kinds, list(TOKENS), owned, own)
        text = table[tokens.flatten()[placed.tokens[own]]]
        parts = [(placed.rows[n], rows[n][placed.picked[n]] if placed.picked else rows[n]) for n in TOKENS]
        built = assemble(placed, [(placed.text, text), *parts])
        assert torch.equal(built, whole[[p for start, stop in mine for p in range(start, stop)]])


def test_packed_documents_are_cut_one_by_one() -> None:
    tokens = torch.arange(24)[None]
    owners = positions(24, 2, 1, sequence_parallel=False, documents=(0, 8, 24))
    parts = [make_placement(kinds_of_ids(tokens, {}), [], [[mine]], 0).tokens[0].tolist() for mine in owners]
    assert parts == [[0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23], [2, 3, 4, 5, *range(12, 20)]]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"a": [((2, 3), (4, 1))]}, "each position takes one row"),
        ({"a": [((2, 3),)], "b": [((0, 3),)]}, "b rows at positions [0, 3)"),
        ({"a": [((6, 3),)]}, "the sequence has 8"),
    ],
)
def test_runs_that_overlap_or_leave_the_sequence(runs: dict, words: str) -> None:
    with pytest.raises(ValueError) as error:
        kinds_of_runs(runs, 8)
    assert words in str(error.value)


def test_rows_that_do_not_fill_the_places() -> None:
    placed = make_placement(kinds_of_ids(ids(), TOKENS), list(TOKENS), [[((0, 16),)] * 3], 0)
    text = placed.text, torch.zeros(len(placed.text), 2)
    with pytest.raises(ValueError, match="for 48 positions"):
        assemble(placed, [text])
    rows = [(places, torch.zeros(len(places), 3)) for places in placed.rows.values()]
    with pytest.raises(ValueError, match="one dtype and width"):
        assemble(placed, [text, *rows])
