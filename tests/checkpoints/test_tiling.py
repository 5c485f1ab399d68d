"""`tiling_problem` against a count of the boxes at every point."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.structure import tiling_problem

Box = tuple[tuple[int, ...], tuple[int, ...]]


def _cover(shape: tuple[int, ...], boxes: list[Box]) -> dict[tuple[int, ...], int]:
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for point in product(*(range(o, o + s) for o, s in zip(offsets, sizes))):
            counts[point] += 1
    return counts


def _tiles(draw: st.DrawFn, low: tuple[int, ...], size: tuple[int, ...], depth: int) -> list[Box]:
    axes = [axis for axis, n in enumerate(size) if n > 1]
    if not axes or not depth or not draw(st.booleans()):
        return [(low, size)]
    axis = draw(st.sampled_from(axes))
    cut = draw(st.integers(1, size[axis] - 1))
    first, second, middle = [*size], [*size], [*low]
    first[axis], second[axis], middle[axis] = cut, size[axis] - cut, low[axis] + cut
    return [
        *_tiles(draw, low, tuple(first), depth - 1),
        *_tiles(draw, tuple(middle), tuple(second), depth - 1),
    ]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    return shape, draw(st.permutations(_tiles(draw, (0,) * len(shape), shape, 4)))


@settings(max_examples=120)
@given(tiling=tilings(), data=st.data())
def test_tilings_and_what_is_left_of_them(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    assert tiling_problem(shape, boxes) is None
    changed = list(boxes)
    for _ in range(data.draw(st.integers(1, 2))):
        box = data.draw(st.sampled_from(boxes))
        if data.draw(st.booleans()) and box in changed:
            changed.remove(box)
        else:
            changed.append(box)
    counts = _cover(shape, changed)
    wrong = min((point for point, n in counts.items() if n != 1), default=None)
    problem = tiling_problem(shape, changed)
    if wrong is None:
        assert problem is None
    else:
        assert problem is not None and f"at {list(wrong)};" in problem
        assert ("overlap" in problem) == (counts[wrong] > 1)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0,), (2, 2))], "does not have 2 dimensions"),
        ([((0, 0), (4, 4)), ((3, 0), (2, 4))], "reaches beyond"),
        ([], r"no chunk covers the elements at \[0, 0\]; its chunks hold 0 of 16"),
    ],
)
def test_boxes_that_do_not_fit(boxes: list[Box], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(tiling_problem((4, 4), boxes))
