"""Which part of the language model's input this rank has, and where rows of text and modalities go in it.

A place is an index into the flat [s_local * b, h] view of the decoder input [s_local, b, h], where s_local is
the sequence divided by context and sequence parallelism (`partition.positions`). Places are computed on the
host from the runs of the feed, so that the host never waits for the device; without a feed they are computed
from the token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.intervals import Intervals
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import Runs, positions, sample_shares


@dataclass(frozen=True)
class Placement:
    """Places of all rows in one rank's part of the decoder input.

    length, batch: s_local and b.
    text: places [n] of text tokens.
    tokens: indices of text tokens in the flat input_ids [b * s], for each tensor rank; one entry if all
        tensor ranks own the same positions.
    rows: modality -> places of its rows, by sample, then by position.
    picked: modality -> indices of these rows among the lane's rows, if the part is not the whole sequence.
    lane_rows: modality -> number of the lane's rows, for the modalities in `picked`.
    """

    length: int
    batch: int
    text: Tensor
    tokens: tuple[Tensor, ...]
    rows: dict[str, Tensor]
    picked: dict[str, Tensor]
    lane_rows: dict[str, int]


def expand(rows: Intervals) -> Tensor:
    """The row numbers [n] of a set, on the host."""
    return torch.cat([torch.arange(start, stop) for start, stop in rows] or [torch.arange(0)])


def on_device(index: Tensor, device: torch.device) -> Tensor:
    """Copy an index from the host to the device without synchronizing."""
    if index.device == device or device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def kinds_of_runs(runs: Mapping[str, Sequence[Runs]], length: int) -> Tensor:
    """Kind of each position by the feed, [b, s] on the host: 0 for text, i + 1 for the i-th modality."""
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
    """Kind of each position by the token ids, [b, s] on their device, numbered as in `kinds_of_runs`."""
    kinds = torch.zeros_like(input_ids, dtype=torch.int8)
    for number, token in enumerate(token_ids.values(), 1):
        kinds.masked_fill_(input_ids == token, number)
    return kinds


def make_placement(
    kinds: Tensor,
    names: Sequence[str],
    owned: Sequence[Sequence[Intervals]],
    own: int,
    pick: bool = True,
) -> Placement:
    """Places of a rank's part from kinds [b, s], for which on a GPU the host waits."""
    batch, whole = kinds.shape
    mine = [torch.stack([expand(rows) for rows in samples]).to(kinds.device) for samples in owned]
    start = torch.arange(batch, device=kinds.device)[:, None] * whole
    tokens = tuple((at + start)[kinds.gather(1, at) == 0] for at in mine)
    part = kinds.gather(1, mine[own])  # [b, s_local]
    length = part.shape[1]
    place = (
        torch.arange(length, device=kinds.device) * batch + torch.arange(batch, device=kinds.device)[:, None]
    )
    rows, picked, lane_rows = {}, {}, {}
    for number, name in enumerate(names, 1):
        here = part == number
        rows[name] = place[here]
        if pick and length < whole:
            order = ((kinds == number).flatten().cumsum(0) - 1).view_as(kinds)
            lane_rows[name] = int((kinds == number).sum())
            picked[name] = order.gather(1, mine[own])[here]
    return Placement(length, batch, place[part == 0], tokens, rows, picked, lane_rows)


def assemble(placement: Placement, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Write rows to their places: [s_local, b, h] from parts (places [n], rows [n, h]) that fill it."""
    total = placement.length * placement.batch
    counts = [(len(places), rows.shape[0]) for places, rows in parts]
    if any(a != b for a, b in counts) or sum(a for a, _ in counts) != total:
        raise ValueError(f"(places, rows) = {counts} for {total} positions: give one row for each position")
    kinds = {(rows.dtype, rows.shape[1:]) for _, rows in parts}
    if len(kinds) != 1:
        raise ValueError(
            f"rows of text and modalities differ: {sorted(map(str, kinds))}: use one dtype and width"
        )
    out: Tensor = _Assemble.apply(tuple(places for places, _ in parts), *(rows for _, rows in parts))
    return out.view(placement.length, placement.batch, -1)


class _Assemble(torch.autograd.Function):
    """Writes one buffer once; autograd's own index_copy would copy the buffer for every part."""

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
    """The same rows [n, h]; in backward, sum their gradients over the groups.

    Slices are disjoint, so every sum has one non-zero number at most, and it is exact.
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


@dataclass(frozen=True)
class RankShard:
    """The part of the language model's input that this rank has.

    cp, context_rank, tp, tensor_rank: sizes and ranks of the parallel dimensions that cut the sequence; tp
        is 1 without sequence parallelism.
    groups: process groups of these dimensions.
    lane, lanes: this rank's data lane, and the number of data lanes.
    """

    cp: int = 1
    context_rank: int = 0
    tp: int = 1
    tensor_rank: int = 0
    groups: tuple[Any, ...] = ()
    lane: int = 0
    lanes: int = 1

    @classmethod
    def of(cls, partition: Any, layout: Layout | None) -> RankShard:
        """Make it from upstream's `PartitionConfig` (None: not cut) and the layout (None: one lane)."""
        made = cls()
        if partition is not None and partition.use_cp:
            group = partition.cp_group
            made = replace(made, cp=group.size(), context_rank=group.rank(), groups=(group,))
        if partition is not None and partition.seq_parallel and partition.tp_group.size() > 1:
            group = partition.tp_group
            groups = (*made.groups, group)
            made = replace(made, tp=group.size(), tensor_rank=group.rank(), groups=groups)
        if layout is not None and dist.get_rank() in layout.ranks:
            made = replace(made, lane=layout.lane_of(dist.get_rank()), lanes=layout.dp)
        return made

    def of_lane(self, microbatch: Microbatch | None) -> Microbatch | None:
        if microbatch is None or self.lanes == 1:
            return microbatch
        count = len(microbatch.rows[0][1]) if microbatch.rows else len(microbatch.lengths)
        mine = sample_shares(count, self.lanes)[self.lane]
        cut = slice(mine.start, mine.stop)
        return Microbatch(
            tuple((name, rows[cut]) for name, rows in microbatch.rows),
            tuple((name, runs[cut]) for name, runs in microbatch.runs),
            microbatch.lengths[cut],
            microbatch.documents[cut],
            tuple((name, media[cut]) for name, media in microbatch.media),
        )

    def owned(self, length: int, documents: Sequence[tuple[int, ...]]) -> tuple[list[list[Intervals]], int]:
        """Positions of each sample for each tensor rank that owns other positions, and this rank's index."""
        first, cut = self.context_rank * self.tp, self._positions(length, self.tp, documents)
        return [[ranks[first + t] for ranks in cut] for t in range(self.tp)], self.tensor_rank

    def _positions(
        self, length: int, tp: int, documents: Sequence[tuple[int, ...]]
    ) -> list[tuple[Intervals, ...]]:
        return [
            positions(length, self.cp, tp, sequence_parallel=tp > 1, documents=tuple(bounds))
            for bounds in documents
        ]

    def of_context(self, values: Tensor, documents: Sequence[tuple[int, ...]]) -> Tensor:
        """Values at the positions of this context rank: [b, s] -> [b, s / cp]."""
        if self.cp == 1:
            return values
        cut = self._positions(values.shape[1], 1, documents)
        at = torch.stack([expand(ranks[self.context_rank]) for ranks in cut])
        return values.gather(1, on_device(at, values.device))

    def documents(self, packed: PackedSeqParams | None, length: int) -> tuple[int, ...]:
        """Document borders of a packed sequence; () if it is not packed or the sequence is not cut.

        The borders are those of the padded documents; tokens after the last document are one more document.
        On a GPU the host waits for the borders.
        """
        if packed is None or self.cp == self.tp == 1:
            return ()
        padded = packed.cu_seqlens_q_padded
        borders = packed.cu_seqlens_q if padded is None else padded
        if packed.qkv_format != "thd" or borders is None:
            raise ValueError(
                f"packed sequences with qkv_format={packed.qkv_format!r}: use 'thd' and cu_seqlens_q"
            )
        found = borders.tolist()
        if found[-1] > length:
            raise ValueError(
                f"cu_seqlens end at {found[-1]}, but the sequence has {length}: pass those of this batch"
            )
        return tuple(found) if found[-1] == length else (*found, length)
