"""Microbatches whose activations a pipeline rank holds at once, in Megatron 0.19's schedules.

1F1B: a rank runs pp - rank - 1 forward passes first, then one forward and one backward in turn, so
pp - rank are held. Interleaved (vpp > 1): the unit is one microbatch in one of the rank's vpp chunks. First
run 2 * (pp - rank - 1) + (vpp - 1) * pp of them; forward takes pp microbatches through a chunk before the
next one, backward does so from the last chunk on. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_nemotron3.args import ParallelLayout

Counts = tuple[int, ...]


def in_flight(
    layout: ParallelLayout, pp_rank: int, microbatches: int, weights: Sequence[float] = ()
) -> Counts:
    """Microbatches held at the worst moment in each of the rank's vpp chunks, in the order of the stages.

    Args:
        microbatches: of one step.
        weights: bytes of one microbatch in each chunk, which say what the worst moment is; empty: all alike.

    Raises:
        ValueError: no such rank, or no microbatch.
    """
    if not 0 <= pp_rank < layout.pp or microbatches < 1:
        raise ValueError(
            f"pp_rank={pp_rank} of PP={layout.pp}, microbatches={microbatches}: use 0 to {layout.pp - 1}, "
            "and 1 microbatch or more"
        )
    if layout.pp == 1:
        return (1,)
    if layout.vpp == 1:
        return (min(layout.pp - pp_rank, microbatches),)
    # Beyond this many the schedule repeats itself.
    enough = 4 * layout.pp
    if microbatches > enough:
        microbatches = enough + microbatches % layout.pp
    moments = _moments(layout.pp, layout.vpp, pp_rank, microbatches)
    if not weights:
        return max(moments, key=sum)
    return max(moments, key=lambda counts: sum(n * w for n, w in zip(counts, weights, strict=True)))


@lru_cache(maxsize=4096)
def _moments(pp: int, vpp: int, rank: int, microbatches: int) -> tuple[Counts, ...]:
    """What is held after each forward pass: different states, without those that another one exceeds."""
    total = microbatches * vpp
    first = min(2 * (pp - rank - 1) + (vpp - 1) * pp, total)
    order = _chunks(pp, vpp, microbatches)
    held = [0] * vpp
    found: dict[Counts, None] = {}
    for step, chunk in enumerate(order):
        held[chunk] += 1
        found[tuple(held)] = None
        if step >= first:
            held[vpp - 1 - order[step - first]] -= 1
    return tuple(
        counts
        for counts in found
        if not any(other != counts and all(map(int.__ge__, other, counts)) for other in found)
    )


def _chunks(pp: int, vpp: int, microbatches: int) -> list[int]:
    """The chunk of each forward pass, in order."""
    order: list[int] = []
    for start in range(0, microbatches, pp):
        group = min(pp, microbatches - start)
        for chunk in range(vpp):
            order += [chunk] * group
    return order
