"""Check a plan without processes: every receiver gets all of its parameters once, from ranks that hold them.

Each index of a tensor's axis, on either side, and each expert has a random weight. The weights of what a
receiver gets must add up to those of its shares, which are taken from the layouts and not from the plan. A
part that is missing, doubled, or put to a wrong place would change the sum.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy

from megatron_nemotron3.inference.refit.plan import RefitPlan, TensorTransfer
from megatron_nemotron3.inference.refit.planner import HeldTensor, tensors
from megatron_nemotron3.inference.refit.shares import Shares


def check(plan: RefitPlan) -> None:
    """Check a plan of all tensors; a ValueError names the first wrong tensor and rank."""
    by_tensor: dict[tuple[str, str], list[TensorTransfer]] = {}
    for transfer in plan.transfers:
        by_tensor.setdefault((transfer.name, transfer.target), []).append(transfer)
    weights = _Weights()
    for held in tensors(plan.training, plan.serving):
        found = by_tensor.pop((held.tensor, held.target), [])
        _check_tensor(held, found, weights)
    if by_tensor:
        raise ValueError(f"{next(iter(by_tensor))[0]} is sent, but belongs to no receiver")
    if (most := plan.load().space) > plan.buffer:
        raise ValueError(f"a step needs {most:,} bytes, the buffer has {plan.buffer:,}")


def bound(plan: RefitPlan) -> int:
    """The least that the busiest sender of any plan sends: some bytes can be sent by few ranks only."""
    world, stages = plan.training.layout.world_size, plan.training.layout.pp
    named = {(held.tensor, held.target): held for held in tensors(plan.training, plan.serving)}
    needs: dict[tuple[int, ...], int] = defaultdict(int)
    of_stages = [0] * stages
    for transfer in plan.transfers:
        held = named[transfer.name, transfer.target]
        candidates = _candidates(held, transfer)
        size = transfer.bytes * int(transfer.between(plan.colocated).sum())
        needs[candidates] += size
        first, last = (rank // (world // stages) for rank in (candidates[0], candidates[-1]))
        if first == last:
            of_stages[first] += size
    shared = [(size, len(ranks)) for ranks, size in needs.items()]
    shared += [(sum(needs.values()), world), *((size, world // stages) for size in of_stages)]
    return max(-(-size // ranks) for size, ranks in shared)


def _candidates(held: HeldTensor, transfer: TensorTransfer) -> tuple[int, ...]:
    """Training ranks that hold what a transfer sends."""
    each = held.experts // held.training.layout.ep if held.row.routed else 1
    for index, shares in enumerate(held.shares()[0]):
        if all(any(s.start <= cut.start and cut.stop <= s.stop for s in shares) for cut in transfer.cuts):
            return tuple(held.training.holders(held.row, held.stages[0], index, transfer.first // each))
    raise ValueError(f"{transfer.name}: no sender holds {transfer.cuts}")


class _Weights:
    """Random weights of the elements of an axis, as sums up to each index, modulo 2**64."""

    def __init__(self) -> None:
        self._random = numpy.random.default_rng(0)
        self._sums: dict[str, Any] = {}

    def total(self, kind: str, start: int, stop: int) -> int:
        sums = self._sums.get(kind, numpy.zeros(1, "uint64"))
        if len(sums) <= stop:
            drawn = self._random.integers(0, 1 << 64, 2 * stop + 1, "uint64")
            sums = numpy.concatenate((sums, sums[-1:] + numpy.cumsum(drawn, dtype="uint64")))
            self._sums[kind] = sums
        return (int(sums[stop]) - int(sums[start])) % (1 << 64)

    def part(self, start: int, stop: int, at: int) -> int:
        return self.total("rows", start, stop) * 3 + self.total("places", at, at + stop - start)


def _check_tensor(held: HeldTensor, transfers: list[TensorTransfer], weights: _Weights) -> None:
    serving, experts = held.serving, held.experts
    have, want = held.shares()
    blocks = serving.ep if held.row.routed and held.parameter is not None else 1
    sums = numpy.zeros(serving.size, "uint64")
    for transfer in transfers:
        senders, receivers = transfer.pairs
        value = sum(weights.part(cut.start, cut.stop, cut.target) for cut in transfer.cuts)
        value *= weights.total("experts", transfer.first, transfer.last)
        expert_place = transfer.first - transfer.place if transfer.stacked else 0
        if transfer.stacked and expert_place % (experts // blocks):
            raise ValueError(f"{transfer.name}: expert {transfer.first} is put to place {transfer.place}")
        numpy.add.at(sums, receivers, numpy.uint64(value % (1 << 64)))
        _check_senders(held, transfer, senders, have)
    expected = numpy.zeros(serving.size, "uint64")
    for block in range(blocks):
        each = experts // blocks
        factor = weights.total("experts", block * each, (block + 1) * each)
        for index, shares in enumerate(want):
            value = sum(weights.part(*share) for share in shares)
            ranks = list(serving.holders(held.role, held.stages[1], index, block))
            expected[ranks] = numpy.uint64(value * factor % (1 << 64))
    if (wrong := numpy.flatnonzero(sums != expected)).size:
        raise ValueError(f"{held.tensor}: serving rank {wrong[0]} does not get its part once")


def _check_senders(
    held: HeldTensor, transfer: TensorTransfer, senders: Any, have: tuple[Shares, ...]
) -> None:
    each = held.experts // held.training.layout.ep if held.row.routed else 1
    if transfer.first // each != (transfer.last - 1) // each:
        raise ValueError(f"{transfer.name}: experts {transfer.first} to {transfer.last - 1} are of two ranks")
    for index, shares in enumerate(have):
        holders = held.training.holders(held.row, held.stages[0], index, transfer.first // each)
        if numpy.isin(senders, holders).all() and all(
            any(
                s.start <= cut.start and cut.stop <= s.stop and cut.source == s.at + cut.start - s.start
                for s in shares
            )
            for cut in transfer.cuts
        ):
            return
    raise ValueError(f"{transfer.name}: a sender does not hold {transfer.cuts[0]}")
