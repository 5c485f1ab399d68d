"""The layer-pattern language: one character per layer, `|` for a pipeline cut, `/` before each MTP depth.

    MEM*E|MEM*E/*E/*E
    ----- ----- -- --
    stage stage MTP depths 1 and 2 (the same layers at every depth)

Brackets group layers of a stage, `M[*E]`: Megatron's schedule can then overlap the experts' communication of
one micro-batch with another one's attention (Megatron-LM #4798, not in 0.19). The model is the same; its
checkpoint numbers a group as one layer (`HybridPattern.numbers`).

This is the language of Megatron's `--hybrid-layer-pattern`, restricted to the four layer kinds of this
family. It is stricter in one respect: Megatron allows any stage or MTP depth to be empty, while this parser
allows only a last stage that holds just MTP and the loss. With virtual pipelining the pattern has pp * vpp
stages, and stage i belongs to pipeline rank i mod pp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

#: Character -> layer kind.
KINDS: dict[str, str] = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}

#: Ten times the layers of the deepest published model; costs of a layout are counted layer by layer.
MOST_LAYERS = 1_280
PIPE = "|"
_OPEN, _CLOSE = "[", "]"
_LAYOUT = str.maketrans("", "", PIPE + _OPEN + _CLOSE)
MTP_SEPARATOR = "/"

# (first layer, one past the last) -> cost of a stage of these layers.
_StageCost = Callable[[int, int], float]

# Maxima that differ by less count as equal, because costs are sums of floats.
_RELATIVE_TOLERANCE = 1e-9


def _check_characters(pattern: str, allowed: str, full: str, start: int = 0) -> None:
    for position, character in enumerate(pattern, start=start):
        if character not in allowed:
            raise ValueError(
                f"layer pattern {full!r}: character {character!r} at position {position} (counted from 0) "
                f"is not allowed here: use {' '.join(allowed)}"
            )


def without_layout(full: str) -> str:
    """The layers of a full pattern as they are computed: without pipeline cuts and groups."""
    return full.translate(_LAYOUT)


def validate(pattern: str) -> None:
    """Check a pattern of layers alone: no `|`, no `/`."""
    if not pattern:
        raise ValueError(f"empty layer pattern: give at least one of {' '.join(KINDS)}")
    if len(pattern) > MOST_LAYERS:
        raise ValueError(f"layer pattern of {len(pattern):,} layers: a model has at most {MOST_LAYERS:,}")
    _check_characters(pattern, "".join(KINDS), pattern)


def count(pattern: str) -> dict[str, int]:
    """Number of layers of each kind: `count("MEM") == {"M": 2, "*": 0, "E": 1, "-": 0}`.

    Pipeline cuts are ignored; the layers of every MTP depth count.

    Raises:
        ValueError: a pattern that `parse` refuses.
    """
    parsed = parse(pattern)
    layers = parsed.main + "".join(parsed.mtp)
    return {kind: layers.count(kind) for kind in KINDS}


@dataclass(frozen=True)
class HybridPattern:
    """A parsed `--hybrid-layer-pattern`. `str()` returns the text that it was parsed from."""

    #: Layers of each pipeline stage (of each virtual stage with virtual pipelining), in order.
    stages: tuple[str, ...]
    #: Layers of each MTP depth, all equal; empty without MTP.
    mtp: tuple[str, ...] = ()
    #: (first decoder layer, one past the last) of each bracketed group, in order.
    groups: tuple[tuple[int, int], ...] = ()

    @property
    def main(self) -> str:
        """The decoder layers, without cuts."""
        return "".join(self.stages)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without MTP, as Megatron's `num_layers`."""
        return len(self.main)

    @property
    def mtp_pattern(self) -> str | None:
        """Layers of one MTP depth; None without MTP."""
        return self.mtp[0] if self.mtp else None

    @property
    def mtp_num_layers(self) -> int:
        """Number of MTP depths."""
        return len(self.mtp)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number in the checkpoint of each decoder layer: its own, or, with groups, that of its group."""
        inner = {layer for first, end in self.groups for layer in range(first + 1, end)}
        numbers = list(itertools.accumulate(layer not in inner for layer in range(self.num_layers)))
        return tuple(number - 1 for number in numbers)

    def __str__(self) -> str:
        first, ends = {first for first, _ in self.groups}, {end - 1 for _, end in self.groups}
        stages, layer = [], itertools.count()
        for stage in self.stages:
            stages.append(
                "".join(
                    f"{_OPEN * (n in first)}{kind}{_CLOSE * (n in ends)}"
                    for kind, n in zip(stage, layer, strict=False)
                )
            )
        return MTP_SEPARATOR.join((PIPE.join(stages), *self.mtp))


def parse(full: str) -> HybridPattern:
    """Parse a full pattern: stages cut by `|`, groups in brackets, then MTP depths each opened by `/`.

    Raises:
        ValueError: a character that is not allowed in its place (such as `|` inside MTP), no decoder layer,
            an empty stage other than a last one that MTP follows, an empty MTP depth, MTP depths that
            differ, or a group that Megatron refuses or whose layers would share names in a checkpoint.
    """
    main, *mtp = full.split(MTP_SEPARATOR)
    _check_characters(main, "".join(KINDS) + PIPE + _OPEN + _CLOSE, full)
    start = len(main) + 1
    for depth in mtp:
        _check_characters(depth, "".join(KINDS), full, start)
        start += len(depth) + 1
    groups = tuple(_groups(main, full))
    stages = [without_layout(stage) for stage in main.split(PIPE)]
    if not any(stages):
        raise ValueError(f"layer pattern {full!r}: no decoder layer: give at least one of {' '.join(KINDS)}")
    for index, stage in enumerate(stages):
        if not stage and not (index == len(stages) - 1 and mtp):
            raise ValueError(
                f"layer pattern {full!r}: stage {index} of {len(stages)} is empty: only the last may be, "
                "and only when MTP follows (it then holds MTP and the loss)"
            )
    for index, depth in enumerate(mtp):
        if not depth:
            raise ValueError(f"layer pattern {full!r}: MTP depth {index + 1} is empty: drop its '/'")
        if depth != mtp[0]:
            raise ValueError(
                f"layer pattern {full!r}: MTP depth 1 is {mtp[0]!r} but depth {index + 1} is {depth!r}: "
                "all depths must be equal"
            )
    return HybridPattern(tuple(stages), tuple(mtp), groups)


def _groups(main: str, full: str) -> Iterator[tuple[int, int]]:
    """Yield first layer and end of each group."""
    layer, first, inside = 0, 0, None
    for position, character in enumerate(main):
        at = f"layer pattern {full!r}: {character!r} at position {position} (counted from 0)"
        if character == _OPEN:
            if inside is not None:
                raise ValueError(f"{at} opens a group inside a group: close the first one before")
            first, inside = layer, ""
        elif character == _CLOSE:
            if not inside:
                raise ValueError(f"{at} closes {'no' if inside is None else 'an empty'} group")
            yield first, layer
            inside = None
        elif character == PIPE:
            if inside is not None:
                raise ValueError(f"{at} cuts a group: a group is in one stage")
        else:
            if inside is not None:
                if "E" in inside:
                    raise ValueError(f"{at} follows E in a group: E must be the last layer of its group")
                # A dense layer's names begin with mlp., as those of experts do.
                if character in inside or {character, *inside} >= {"-", "E"}:
                    raise ValueError(
                        f"{at} has the same names in a checkpoint as another layer of its group: give a "
                        "group at most one M, one * and one of - and E"
                    )
                inside += character
            layer += 1
    if inside is not None:
        raise ValueError(f"layer pattern {full!r}: the group [{inside} is not closed: add ']'")


def join_stages(stages: tuple[str, ...] | list[str], mtp: tuple[str, ...] | list[str] = ()) -> str:
    """The pattern text of stages and MTP depths: `join_stages(["MEM", "*E"], ["*E"]) == "MEM|*E/*E"`."""
    text = str(HybridPattern(tuple(stages), tuple(mtp)))
    parse(text)
    return text


def cut(
    pattern: str,
    stages: int,
    cost: Sequence[float],
    *,
    last_stage_extra: float = 0.0,
) -> tuple[str, ...]:
    """Cut a decoder pattern into contiguous, non-empty stages, so that the most expensive stage is cheapest.

    `cost`: of each layer; `last_stage_extra`: of what the last stage has besides.

    The result is exact (dynamic programming). Among the cuts with the least maximum it is the one with the
    most equal layer counts (least sum of squares), and among those the one whose longer stages come first.
    """
    validate(pattern)
    layers = len(pattern)
    if not 1 <= stages <= layers:
        raise ValueError(f"cannot cut {layers} layers into {stages} stages: use 1 to {layers}")
    if len(cost) != layers:
        raise ValueError(f"{len(cost)} costs given for the {layers} layers of pattern {pattern!r}")
    named = [(f"cost of {kind!r}", one) for kind, one in zip(pattern, cost, strict=True)]
    for name, value in (*named, ("last_stage_extra", last_stage_extra)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}: costs must be zero or more")

    prefix = [0.0, *itertools.accumulate(cost)]

    def stage_cost(begin: int, end: int) -> float:
        return prefix[end] - prefix[begin] + (last_stage_extra if end == layers else 0.0)

    bottleneck = _least_maximum(layers, stages, stage_cost)
    ends = _most_equal(layers, stages, stage_cost, bottleneck * (1 + _RELATIVE_TOLERANCE))
    return tuple(pattern[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


def _least_maximum(layers: int, stages: int, stage_cost: _StageCost) -> float:
    """The cost of the most expensive stage in the best cut."""
    costs = sorted({stage_cost(i, j) for i in range(layers) for j in range(i + 1, layers + 1)})
    low, high = 0, len(costs) - 1
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(layers, stage_cost, costs[middle]) <= stages:
            high = middle
        else:
            low = middle + 1
    return costs[low]


def _stages_needed(layers: int, stage_cost: _StageCost, bound: float) -> float:
    """The smallest number of stages that cost at most `bound` each; infinite if a single layer costs more."""
    needed, begin = 0, 0
    while begin < layers:
        end = begin
        while end < layers and stage_cost(begin, end + 1) <= bound:
            end += 1
        if end == begin:
            return float("inf")
        needed, begin = needed + 1, end
    return needed


def _most_equal(layers: int, stages: int, stage_cost: _StageCost, bound: float) -> list[int]:
    """Ends of the stages in the cut with the least sum of squared lengths and no stage above `bound`."""
    infeasible = layers * layers + 1
    # squares[k][i]: the least sum for the layers from i on in k + 1 stages.
    squares = [[(layers - i) ** 2 if stage_cost(i, layers) <= bound else infeasible for i in range(layers)]]
    choice: list[list[int]] = [[layers] * layers]
    for done in range(1, stages):
        row, ends = [], []
        for i in range(layers):
            value, end = infeasible, layers
            for j in range(i + 1, layers - done + 1):
                if stage_cost(i, j) > bound:
                    break  # longer ones cost more
                candidate = (j - i) ** 2 + squares[-1][j]
                if candidate <= value:  # <=: the longer stage first
                    value, end = candidate, j
            row.append(min(value, infeasible))
            ends.append(end)
        squares.append(row)
        choice.append(ends)
    ends_of_stages, begin = [], 0
    for remaining in reversed(range(stages)):
        begin = choice[remaining][begin]
        ends_of_stages.append(begin)
    return ends_of_stages
