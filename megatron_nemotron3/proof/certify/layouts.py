"""The small layouts that stand for a large one, and the short pipeline stages that stand for long ones.

A layout of hundreds of ranks is represented by several of a few ranks. Together they have every pair of
parallel dimensions of the large one: an error of one dimension shows where that dimension is above 1, an
error of a combination where both are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import pattern as patterns

#: A sequence that tensor (sequence) parallelism, context parallelism and stages cut together.
_TRIPLE = ("CP", "PP", "TP")
#: Largest number of micro-batches of a step that is tried, if it need not be more.
_MICROBATCHES = 20
#: Layouts that stand for a large one, so that a proof takes about two minutes.
MOST = 3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A layout with what else Megatron cuts by: instances of the distributed optimizer."""

    layout: ParallelLayout
    #: `--num-distributed-optimizer-instances`.
    instances: int = 1

    @cached_property
    def features(self) -> frozenset[str]:
        """What may go wrong in this layout and not in a smaller one."""
        layout = self.layout
        above = {
            "TP": layout.tp > 1,
            "TP without SP": layout.tp > 1 and not layout.sequence_parallel,
            "PP": layout.pp > 1,
            "PP, stages in the middle": layout.stages > 2,
            "VPP": layout.vpp > 1,
            "CP": layout.cp > 1,
            "DP": layout.dp > 1,
            "EP": layout.ep > 1,
            "EP over TP": layout.ep > 1 and layout.tp > layout.etp,
            "EP over CP or DP": layout.expert_ranks > layout.tp,
            "expert TP": layout.etp > 1,
            "copies of experts": layout.edp > 1,
            "optimizer instances": self.instances > 1,
        }
        return frozenset(name for name, holds in above.items() if holds)

    @cached_property
    def pairs(self) -> frozenset[tuple[str, ...]]:
        """Every pair of features, and the triple that cuts one sequence three times."""
        pairs: set[tuple[str, ...]] = {*itertools.combinations_with_replacement(sorted(self.features), 2)}
        return frozenset(pairs | ({_TRIPLE} if self.features.issuperset(_TRIPLE) else set()))

    def __str__(self) -> str:
        instances = f", {self.instances} optimizer instances" if self.instances > 1 else ""
        return f"{self.layout}{instances}"


def cover(
    large: Sizes, ranks: int, count: int | None = None
) -> tuple[list[Sizes], dict[tuple[str, ...], str]]:
    """Choose small layouts that have the pairs of features of a large one; return what they lack, and why.

    Of all choices of up to `MOST` layouts it is one with the most pairs, then the fewest layouts, then those
    whose pipelines a batch fills as that of the launch does (`microbatches`), then the smallest worlds. The
    layout with the most pairs is the first.

    Args:
        count: micro-batches of a rank of the launch.
    """
    smallest: dict[tuple[frozenset[str], int], Sizes] = {}
    for sizes in _candidates(large, ranks):
        if sizes.features <= large.features:
            held = smallest.setdefault((sizes.features, sizes.layout.pp), sizes)
            if sizes.layout.world_size < held.layout.world_size:
                smallest[sizes.features, sizes.layout.pp] = sizes
    # What another layout of no larger world has, too, is no choice.
    candidates = [
        one
        for (features, pp), one in smallest.items()
        if not any(
            pp == stages and features < more and other.layout.world_size <= one.layout.world_size
            for (more, stages), other in smallest.items()
        )
    ]
    numbers = {pair: 1 << n for n, pair in enumerate(sorted(large.pairs))}
    held_by = [sum(numbers[pair] for pair in sizes.pairs) for sizes in candidates]
    best: dict[tuple[int, int], list[list[Sizes]]] = {}
    for size in range(1, MOST + 1):
        for choice in itertools.combinations(range(len(candidates)), size):
            union = 0
            for index in choice:
                union |= held_by[index]
            worth = union.bit_count(), -size
            if worth >= max(best, default=worth):
                best.setdefault(worth, []).append([candidates[index] for index in choice])

    def fitting(choice: Sequence[Sizes]) -> tuple[int, int]:
        layouts = [one.layout for one in choice]
        return microbatches(large.layout, count, layouts)[0], -sum(one.world_size for one in layouts)

    chosen = max(best[max(best)], key=fitting)
    chosen.sort(key=lambda sizes: (-len(sizes.pairs), sizes.layout.world_size))
    possible = frozenset().union(*(sizes.pairs for sizes in candidates))
    missing = large.pairs.difference(*(sizes.pairs for sizes in chosen))
    reasons = (f"needs more than {ranks} ranks (--ranks)", f"needs more than {MOST} layouts")
    return chosen, {pair: reasons[pair in possible] for pair in sorted(missing)}


def microbatches(
    large: ParallelLayout, count: int | None, layouts: Sequence[ParallelLayout]
) -> tuple[int, int]:
    """Return how many pipelines a batch fills as that of a launch does, and its number of micro-batches.

    Args:
        large: layout of the launch.
        count: micro-batches of one of its ranks; None: not known.
        layouts: of a proxy; all have the same batch.
    """

    def compared(number: int, pp: int) -> int:
        return (number > pp) - (number < pp)

    def kept(total: int, layout: ParallelLayout) -> bool:
        number = total // layout.dp
        if layout.pp == 1 or large.pp == 1:
            return (number > 1) == (count != 1)
        return compared(number, layout.pp) == compared(count or large.pp + 1, large.pp)

    step = math.lcm(*(one.dp * (one.pp if one.vpp > 1 else 1) for one in layouts))
    totals = range(step, max(4 * step, _MICROBATCHES) + 1, step)
    worths = (
        (sum((2 if one.pp > 1 else 1) * kept(total, one) for one in layouts), -total) for total in totals
    )
    worth, total = max(worths)
    return worth, -total


def _candidates(large: Sizes, ranks: int) -> Iterator[Sizes]:
    layout = large.layout
    for tp, cp, dp, pp in itertools.product(
        _small(layout.tp), _small(layout.cp), _small(layout.dp, 4), _small(layout.pp, 3, 4)
    ):
        if tp * cp * dp * pp > ranks:
            continue
        # An interleaved schedule needs several stages; without one, stages in the middle need PP above 2.
        vpp = 2 if layout.vpp > 1 and pp > 1 else 1
        for ep, etp, instances in itertools.product(
            _small(layout.ep, 4), _small(layout.etp), _small(large.instances)
        ):
            if (tp * cp * dp) % (ep * etp) or (cp * dp) % (2 * instances if instances > 1 else 1):
                continue
            if (tp * cp * dp) // (ep * etp) % instances:  # copies of the experts
                continue
            sp = layout.sequence_parallel and tp > 1
            small = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, vpp=vpp, ep=ep, etp=etp, sp=sp)
            yield Sizes(layout=small, instances=instances)


def _small(size: int, *more: int) -> Sequence[int]:
    return [1, *(n for n in (2, *more) if n <= size)]


_T = TypeVar("_T", str, Sequence[str])
#: Two kinds of layers, one behind the other.
Pair = tuple[str, str]


def of_launch(pattern: str, pp: int, first: int | None = None, last: int | None = None) -> list[str]:
    """Return the layers of each stage of a launch."""
    parsed = patterns.parse(pattern)
    if len(parsed.stages) > 1 or pp == 1:
        return list(parsed.stages)
    # Without cuts Megatron takes equal stages, but for a first and a last one of given length.
    layers = parsed.main
    head, tail = first or 0, len(layers) - (last or 0)
    ends = ([layers[:head]] if first is not None else [], [layers[tail:]] if last is not None else [])
    between = pp - len(ends[0]) - len(ends[1])
    return [*ends[0], *(divided(layers[head:tail], between) if between > 0 else ()), *ends[1]]


def divided(parts: _T, count: int) -> list[_T]:
    """Divide a sequence into `count` runs of about equal length."""
    borders = [round(i * len(parts) / count) for i in range(count + 1)]
    return [parts[begin:end] for begin, end in zip(borders, borders[1:], strict=False)]


def joined(stages: Sequence[str], count: int) -> list[str]:
    """Join stages to `count` ones. A last one without layers, which holds MTP and the loss, stays alone."""
    if count > 1 and len(stages) > 1 and not stages[-1]:
        return [*joined(stages[:-1], count - 1), ""]
    return ["".join(part) for part in divided(tuple(stages), count)]


def borders(stages: Sequence[str]) -> list[Pair]:
    """Return the kinds on both sides of each cut, each pair once; "" next to a stage without layers."""
    return list(dict.fromkeys((one[-1:], other[:1]) for one, other in zip(stages, stages[1:], strict=False)))


def neighbors(stages: Sequence[str]) -> list[Pair]:
    """Return the kinds that follow each other inside a stage, each pair once."""
    return list(dict.fromkeys(pair for stage in stages for pair in zip(stage, stage[1:], strict=False)))


def chosen(stages: Sequence[str], count: int) -> list[str]:
    """Choose `count` stages: first, last, and those between that bring new kinds of cuts and stages."""
    if count == 1:
        return ["".join(stages)]
    if len(stages) <= count:
        return list(stages)
    wanted, inner = set(borders(stages)), list(dict.fromkeys(stages[1:-1]))
    result = [stages[0]]
    while len(result) < count - 1:
        end = [stages[-1]] if len(result) == count - 2 else []
        before = wanted & set(borders(result))

        def worth(stage: str, end: list[str] = end, before: set[Pair] = before) -> tuple[int, bool]:
            cuts = wanted & set(borders([*result, stage, *end])) - before
            kinds = frozenset(stage) not in map(frozenset, result)
            return len(cuts) + kinds, stage not in result

        result.append(max(inner, key=worth))
    return [*result, stages[-1]]


def shortened(stages: Sequence[str], model: Sequence[str]) -> tuple[list[str], list[Pair]]:
    """Return each stage with fewer layers, and the neighbors that none of them has.

    A stage keeps its first layer, its last layer and its kinds. Two kinds that follow each other in the model
    do so in one of the short stages, where one has both kinds.
    """
    missing, held = neighbors(model), set(neighbors(stages))
    result = []
    for stage in stages:
        own = set(neighbors([stage]))
        # Neighbors of stages that are not among these go to the first one with both kinds.
        fitting = [
            p for p in missing if p in own or (p not in held and len(stage) > 3 and set(p) <= set(stage))
        ]
        short = _walk(stage, fitting)
        missing = [pair for pair in missing if pair not in neighbors([short])]
        result.append(short)
    return result, missing


def _walk(stage: str, pairs: Sequence[Pair]) -> str:
    """Return few layers that begin and end as `stage` does, with its kinds and with `pairs` of neighbors."""
    if len(stage) < 3:
        return stage
    own, walk, left = neighbors([stage]), stage[0], list(pairs)
    while left:
        step = next((pair for pair in left if pair[0] == walk[-1]), None)
        walk += step[1] if step else _way(walk[-1], left[0][0], own)
        left = [pair for pair in left if pair not in neighbors([walk])]
    while rest := [kind for kind in stage if kind not in walk]:
        walk += min((_way(walk[-1], kind, own) for kind in rest), key=len)
    return walk if walk[-1] == stage[-1] and len(walk) > 1 else walk + _way(walk[-1], stage[-1], own)


def _way(begin: str, end: str, pairs: Sequence[Pair]) -> str:
    """Return the kinds from one to another, the first left out, by the fewest of these neighbors."""
    ways, seen = [""], {begin} - {end}
    while ways:
        steps = [way + b for way in ways for a, b in pairs if a == (way or begin)[-1] and b not in seen]
        if found := next((way for way in steps if way[-1] == end), None):
            return found
        seen |= {way[-1] for way in steps}
        ways = steps
    return end
