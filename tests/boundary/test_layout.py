"""Layouts: the ranks of lanes against upstream's grid, and conversion to text and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.hyper_comm_grid import HyperCommGrid

from megatron_nemotron3.boundary.layout import MODEL_DIMENSIONS, SHARES, Layout

DIMENSIONS = ("tp", "cp", "pp", "dp", "gtp_remat")


@st.composite
def layouts(draw, dimensions=DIMENSIONS) -> Layout:
    names = draw(st.permutations(dimensions))
    sizes = [draw(st.sampled_from([1, 1, 2, 3])) for _ in names]
    share = draw(st.sampled_from(["", *SHARES]))
    return Layout(tuple(zip(names, sizes)), draw(st.sampled_from([0, 0, 5])), draw(st.booleans()), share)


@settings(max_examples=80)
@given(layouts())
def test_lanes_are_those_of_upstreams_grid(layout: Layout) -> None:
    names = [name for name, _ in layout.dimensions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(layout.offset + layout.size))
        grid = HyperCommGrid([size for _, size in layout.dimensions], names, layout.offset)
        assert Layout.from_grid(grid, layout.sequence_parallel, layout.share) == layout
        lanes = [set(ranks) for ranks in grid.get_rank_enum([n for n in names if n in MODEL_DIMENSIONS])]
        stages = [set(ranks) for ranks in grid.get_rank_enum([n for n in names if n != "pp"])]
        contexts = [set(ranks) for ranks in grid.get_rank_enum(["cp"])]
    assert layout.dp == len(lanes)
    for stage in range(layout.pp):
        (of_stage,) = (s for s in stages if layout.coordinates(min(s)).get("pp", 0) == stage)
        ours = layout.lanes(stage)
        assert [set(ranks) for ranks in ours] == [lane & of_stage for lane in lanes]
        for ranks in ours:
            assert list(ranks[: layout.tp]) == sorted(ranks[: layout.tp])  # tp fastest
            for t in range(layout.tp):  # then context rank by context rank
                assert set(ranks[t :: layout.tp]) in contexts
                assert list(ranks[t :: layout.tp]) == sorted(ranks[t :: layout.tp])


@settings(max_examples=80)
@given(layouts())
def test_text_there_and_back(layout: Layout) -> None:
    again = Layout.parse(str(layout))
    assert [again.lanes(stage) for stage in range(again.pp)] == [layout.lanes(s) for s in range(layout.pp)]
    assert str(again) == str(layout)
    assert (again.offset, again.sequence_parallel) == (layout.offset, layout.sequence_parallel)
    assert again.share == layout.share


@pytest.mark.parametrize(
    ("text", "lanes"),
    [
        ("tp=2,dp=2", [(0, 1), (2, 3)]),
        ("tp=2,dp=2,order=dp-tp", [(0, 2), (1, 3)]),
        ("tp=2,cp=2,offset=4", [(4, 5, 6, 7)]),
        ("tp=2,cp=2,order=cp-tp", [(0, 2, 1, 3)]),
        ("pp=2,dp=2", [(0,), (2,)]),
        ("dp=2,gtp_remat=2,order=gtp_remat-dp", [(0,), (1,), (2,), (3,)]),
        (" tp = 2 , sp ", [(0, 1)]),
    ],
)
def test_first_stage(text: str, lanes: list[tuple[int, ...]]) -> None:
    assert list(Layout.parse(text).lanes(0)) == lanes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2,td=4", "'td=4' has no meaning: use tp=, cp=, pp=, dp=, offset= and sp"),
        ("", "'' has no meaning"),
        ("tp", "'tp' has no meaning"),
        ("tp=-1", "'tp=-1' has no meaning"),
        ("tp=²", "'tp=²' has no meaning"),
        ("tp=1,tp=2", "tp is given twice"),
        ("tp=0", "tp=0: use sizes from 1"),
        ("sp=1", "sp=1: use sp alone"),
        ("dp=2,order=tp", "'dp=2' has no meaning: use tp="),
        ("order=tp-tp", "order names a dimension twice"),
    ],
)
def test_wrong_text(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


def test_wrong_layouts() -> None:
    with pytest.raises(ValueError, match="a dimension is given twice"):
        Layout((("tp", 1), ("tp", 2)))
    with pytest.raises(ValueError, match="offset=-1: use an offset from 0"):
        Layout.of(offset=-1)
    with pytest.raises(ValueError, match="no pipeline stage 2: use 0 to 1"):
        Layout.of(pp=2).lanes(2)
    with pytest.raises(ValueError, match="rank 3 is not in layout dp=2,offset=1, ranks 1-2"):
        Layout.of(dp=2, offset=1).coordinates(3)
