"""Do boxes fill a box exactly once?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product


def tiling_problem(
    shape: Sequence[int], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str | None:
    """What keeps `boxes` of (offsets, sizes) from filling a tensor of `shape` exactly once; None: nothing.

    The number of boxes over a point is a function on the grid. It is fixed by its mixed differences, which
    are +1 or -1 at the corners of a box and 0 elsewhere. So the boxes cover every point once if and only if
    these sums equal those of the whole tensor, and where they first differ, in lexicographic order, the
    difference is the number of boxes too many (too few: negative) over that very point. Any number of
    dimensions, linear in the number of boxes.
    """
    shape = tuple(shape)
    corners: defaultdict[tuple[int, ...], int] = defaultdict(int)
    held = 0
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a chunk at {list(offsets)} of shape {list(sizes)} is not of {len(shape)} dimensions"
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape)):
            return f"the chunk at {list(offsets)} of shape {list(sizes)} reaches beyond {list(shape)}"
        _add(corners, offsets, sizes, 1)
        held += math.prod(sizes)
    _add(corners, (0,) * len(shape), shape, -1)
    wrong = min((point for point, count in corners.items() if count), default=None)
    if wrong is None:
        return None
    what = "two chunks overlap" if corners[wrong] > 0 else "no chunk covers the elements"
    return f"{what} at {list(wrong)}; its chunks hold {held:,} of {math.prod(shape):,} elements"


def _add(
    corners: dict[tuple[int, ...], int], offsets: Sequence[int], sizes: Sequence[int], times: int
) -> None:
    for ends in product((0, 1), repeat=len(sizes)):
        point = tuple(o + s * e for o, s, e in zip(offsets, sizes, ends))
        corners[point] += times * (-1) ** sum(ends)
