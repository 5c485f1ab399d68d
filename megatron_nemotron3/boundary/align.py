"""Rows of text and modalities to their places in a rank's own part of the decoder input.

A place is an index into the flat [s_local * b, h] view of the decoder input [s_local, b, h], where s_local is
the sequence divided by context and sequence parallelism (`slices.positions`). Places are computed from runs
on the host where the feed tells them, so that the device is never waited for; else from the token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.intervals import Intervals
from megatron_nemotron3.boundary.slices import Runs


@dataclass(frozen=True)
class Alignment:
    """What goes where in one rank's part.

    length, batch: s_local and b.
    text: places [n] of text tokens.
    tokens: of each tensor rank that owns other positions, where in the flat input_ids [b * s] its text tokens
        stand; one entry if all own the same.
    rows: by modality, places of its rows, sample by sample, position by position.
    picked: by modality, which of the lane's rows these are, if the part is not the whole sequence.
    """

    length: int
    batch: int
    text: Tensor
    tokens: tuple[Tensor, ...]
    rows: dict[str, Tensor]
    picked: dict[str, Tensor]


def expand(rows: Intervals) -> Tensor:
    """The numbers [n] of a set, on the host."""
    return torch.cat([torch.arange(start, stop) for start, stop in rows] or [torch.arange(0)])


def on_device(index: Tensor, device: torch.device) -> Tensor:
    """An index from the host to the device, without waiting."""
    if index.device == device or device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def kinds_of_runs(runs: Mapping[str, Sequence[Runs]], length: int) -> Tensor:
    """What stands where by the feed, [b, s] on the host: 0 for text, i + 1 for the i-th modality.

    Args:
        runs: by modality, of each sample of the lane.
        length: of every sample's sequence.

    Raises:
        ValueError: two rows claim a position, or a row lies outside.
    """
    batch = len(next(iter(runs.values())))
    kinds = torch.zeros(batch, length, dtype=torch.int8)
    for number, (name, samples) in enumerate(runs.items(), 1):
        for sample, places in enumerate(samples):
            for first, rows in places:
                part = kinds[sample, first : first + rows]
                if len(part) != rows or bool(part.any()):
                    raise ValueError(
                        f"{name} rows at positions [{first}, {first + rows}) of sample {sample}: the "
                        f"sequence has {length}, and each position takes one row"
                    )
                part.fill_(number)
    return kinds


def kinds_of_ids(input_ids: Tensor, token_ids: Mapping[str, int]) -> Tensor:
    """What stands where by the token ids, [b, s] on their device."""
    kinds = torch.zeros_like(input_ids, dtype=torch.int8)
    for number, token in enumerate(token_ids.values(), 1):
        kinds.masked_fill_(input_ids == token, number)
    return kinds


def align(kinds: Tensor, names: Sequence[str], owned: Sequence[Sequence[Intervals]], own: int) -> Alignment:
    """Places in a rank's part.

    Args:
        kinds: [b, s]; on a GPU the host waits for it.
        names: of the modalities, in the order of their numbers.
        owned: of each tensor rank that owns other positions, of each sample, its positions: as many in all
            samples.
        own: this rank's entry in `owned`.
    """
    batch, whole = kinds.shape
    mine = [torch.stack([expand(rows) for rows in samples]).to(kinds.device) for samples in owned]
    start = torch.arange(batch, device=kinds.device)[:, None] * whole
    tokens = tuple((at + start)[kinds.gather(1, at) == 0] for at in mine)
    part = kinds.gather(1, mine[own])  # [b, s_local]
    length = part.shape[1]
    place = (
        torch.arange(length, device=kinds.device) * batch + torch.arange(batch, device=kinds.device)[:, None]
    )
    rows, picked = {}, {}
    for number, name in enumerate(names, 1):
        here = part == number
        rows[name] = place[here]
        if length < whole:
            order = ((kinds == number).flatten().cumsum(0) - 1).view_as(kinds)
            picked[name] = order.gather(1, mine[own])[here]
    return Alignment(length, batch, place[part == 0], tokens, rows, picked)


def assemble(alignment: Alignment, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[s_local, b, h] from (places [n], rows [n, h]) that fill it; gradients are the rows at the places.

    Raises:
        ValueError: the parts' rows are not as many as the places, or differ in dtype or width.
    """
    total = alignment.length * alignment.batch
    counts = [(len(places), rows.shape[0]) for places, rows in parts]
    if any(a != b for a, b in counts) or sum(a for a, _ in counts) != total:
        raise ValueError(f"(places, rows) = {counts} for {total} positions: each position takes one row")
    kinds = {(rows.dtype, rows.shape[1:]) for _, rows in parts}
    if len(kinds) != 1:
        raise ValueError(
            f"rows of text and modalities differ: {sorted(map(str, kinds))}: use one dtype and width"
        )
    out: Tensor = _Assemble.apply(tuple(places for places, _ in parts), *(rows for _, rows in parts))
    return out.view(alignment.length, alignment.batch, -1)


class _Assemble(torch.autograd.Function):
    """One buffer, written once; autograd's own index_copy would copy it for every part."""

    @staticmethod
    def forward(ctx: Any, places: tuple[Tensor, ...], *parts: Tensor) -> Tensor:
        ctx.places = places
        out = parts[0].new_empty(sum(len(p) for p in places), parts[0].shape[1])
        for at, rows in zip(places, parts, strict=True):
            out.index_copy_(0, at, rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            grad.index_select(0, at) if need else None for at, need in zip(ctx.places, needed, strict=True)
        )


def sum_of_slices(rows: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The same rows [n, h]; their gradients, of which each rank of the groups has its slice, become whole.

    The slices are disjoint: every sum is of one number and zeros, so it is exact.
    """
    groups = [group for group in groups if group.size() > 1]
    return _SumOfSlices.apply(rows, groups) if groups else rows


class _SumOfSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            dist.all_reduce(grad, group=group)
        return grad, None
