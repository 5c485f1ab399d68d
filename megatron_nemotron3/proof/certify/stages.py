"""The layers of a launch's pipeline stages, and short stages that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megatron_nemotron3.models import pattern as patterns

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
