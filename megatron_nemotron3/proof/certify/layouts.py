"""The small layouts that stand for a large one.

A layout of hundreds of ranks is represented by several of a few ranks. Together they have every pair of
parallel dimensions of the large one: an error of one dimension shows where that dimension is above 1, an
error of a combination where both are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_nemotron3.launch import ParallelLayout


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
    def pairs(self) -> frozenset[tuple[str, str]]:
        return frozenset(itertools.combinations_with_replacement(sorted(self.features), 2))

    def __str__(self) -> str:
        instances = f", {self.instances} optimizer instances" if self.instances > 1 else ""
        return f"{self.layout}{instances}"


def cover(large: Sizes, ranks: int, most: int = 3) -> tuple[list[Sizes], list[tuple[str, str]]]:
    """Choose small layouts that together have the pairs of features of a large one.

    The first has as many pairs as fit, and each further one as many of the missing pairs as fit. Of equal
    ones the smallest world is taken.
    """
    candidates = [sizes for sizes in _candidates(large, ranks) if sizes.features <= large.features]
    missing, chosen = set(large.pairs), list[Sizes]()
    while missing and len(chosen) < most:
        best = max(candidates, key=lambda sizes: (len(sizes.pairs & missing), -sizes.layout.world_size))
        if not best.pairs & missing:
            break
        chosen.append(best)
        missing -= best.pairs
    return chosen or [Sizes(layout=ParallelLayout())], sorted(missing)


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
