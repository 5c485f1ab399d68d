"""Whether all trainers that hold a weight hold the same: what servers get must not depend on who sends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.inference.refit.parts import checksum
from megatron_nemotron3.inference.refit.plan import RefitPlan
from megatron_nemotron3.inference.refit.planner import tensors

#: A checksum that no tensor has.
ABSENT = -(1 << 63)


def replica_sums(plan: RefitPlan, rank: int | None, source: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
    """Checksum of each tensor that a training rank holds, at a place that all holders of its values share.

    Returns:
        names: Hugging Face's, of each place. A tensor has one for each rank that it is divided among.
        sums: int64, `ABSENT` where this rank (None: no trainer) holds nothing.
    """
    names: list[str] = []
    found: dict[int, int] = {}
    last: tuple[Tensor | None, int] = (None, 0)  # q, k and v are one tensor of Megatron's
    listed: set[str] = set()
    for held in tensors(plan.training, plan.serving):
        if held.weight in listed:  # a packed weight has several tensors
            continue
        listed.add(held.weight)
        ranks, shares = held.sizes[0], len(held.training_shares())
        for expert in range(held.experts):
            name = held.weight.replace("{e}", str(expert))
            if rank is not None and name in source:
                if (tensor := source[name]) is not last[0]:
                    last = tensor, checksum(tensor if tensor.dim() else tensor.view(1))
                found[len(names) + (rank % ranks if shares > 1 else 0)] = last[1]
            names += [name] * shares
    values = torch.full((len(names),), ABSENT)
    values[list(found)] = torch.tensor(list(found.values()), dtype=torch.int64)
    return names, values


def differing_places(sums: Tensor, group: Any) -> list[int]:
    """Places where two ranks of a group hold other values. All of them call it."""
    high, low = sums.clone(), torch.where(sums == ABSENT, torch.iinfo(torch.int64).max, sums)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    return (high > low).nonzero()[:, 0].tolist()


def text(names: Sequence[str], places: Sequence[int], sums: Mapping[int, int]) -> str:
    """Who differs from most; `sums`: rank -> checksum at the first of the places."""
    held = {rank: value for rank, value in sums.items() if value != ABSENT}
    usual = Counter(held.values()).most_common(1)[0][0]
    other = [rank for rank, value in held.items() if value != usual]
    same = [rank for rank, value in held.items() if value == usual]
    more = f" and {len(places) - 1} more tensors" * (len(places) > 1)
    return f"{names[places[0]]}{more} of trainers {other} are not those of trainers {same}"
