"""This rank's place in the language model's layout: its lane's samples, its positions in their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_nemotron3.boundary.align import expand, on_device
from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.intervals import Intervals
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.samples import contiguous
from megatron_nemotron3.boundary.slices import positions


@dataclass(frozen=True)
class Local:
    """Sizes and ranks of context and tensor parallelism, as far as they cut the sequence; the data lane.

    groups: over which slices of a sequence lie.
    """

    cp: int = 1
    context_rank: int = 0
    tp: int = 1
    tensor_rank: int = 0
    sequence_parallel: bool = False
    groups: tuple[Any, ...] = ()
    lane: int = 0
    lanes: int = 1

    @classmethod
    def of(cls, partition: Any, layout: Layout | None) -> Local:
        """From upstream's `PartitionConfig` (None: nothing is cut) and the grid's layout (None: one lane)."""
        made = cls()
        if partition is not None:
            if partition.use_cp:
                group = partition.cp_group
                made = replace(made, cp=group.size(), context_rank=group.rank(), groups=(group,))
            if partition.seq_parallel and partition.tp_group.size() > 1:
                group = partition.tp_group
                made = replace(
                    made,
                    tp=group.size(),
                    tensor_rank=group.rank(),
                    sequence_parallel=True,
                    groups=(*made.groups, group),
                )
        if layout is not None and dist.get_rank() in layout.ranks:
            rank = dist.get_rank()
            stage = layout.coordinates(rank).get("pp", 0)
            lane = next(i for i, ranks in enumerate(layout.lanes(stage)) if rank in ranks)
            made = replace(made, lane=lane, lanes=layout.dp)
        return made

    def lane_of(self, microbatch: Microbatch | None) -> Microbatch | None:
        """What is known of this lane's samples."""
        if microbatch is None or self.lanes == 1:
            return microbatch
        count = len(microbatch.rows[0][1]) if microbatch.rows else len(microbatch.lengths)
        mine = contiguous(count, self.lanes)[self.lane]
        cut = slice(mine.start, mine.stop)
        return Microbatch(
            tuple((name, rows[cut]) for name, rows in microbatch.rows),
            tuple((name, runs[cut]) for name, runs in microbatch.runs),
            microbatch.lengths[cut],
            microbatch.documents[cut],
        )

    def owned(
        self, batch: int, length: int, documents: Sequence[tuple[int, ...]]
    ) -> tuple[list[list[Intervals]], int]:
        """(of each tensor rank that owns other positions, of each sample, its positions; this rank's entry).

        Args:
            documents: of each sample, its `cu_seqlens_padded`, or ().

        Raises:
            ValueError: as `slices.positions`.
        """
        first = self.context_rank * self.tp
        cut = [
            positions(
                length, self.cp, self.tp, sequence_parallel=self.sequence_parallel, documents=tuple(bounds)
            )
            for bounds in documents
        ]
        return [[ranks[first + t] for ranks in cut] for t in range(self.tp)], self.tensor_rank

    def of_context(self, values: Tensor, documents: Sequence[tuple[int, ...]]) -> Tensor:
        """[b, s] -> [b, s / cp]: what stands at the positions of this context rank."""
        if self.cp == 1:
            return values
        cut = [
            positions(values.shape[1], self.cp, 1, sequence_parallel=False, documents=tuple(bounds))
            for bounds in documents
        ]
        at = torch.stack([expand(ranks[self.context_rank]) for ranks in cut])
        return values.gather(1, on_device(at, values.device))

    def documents(self, packed: PackedSeqParams | None, length: int) -> tuple[int, ...]:
        """Borders of the documents of a packed sequence, () if it is none or nothing is cut.

        Documents lie at their padded places; what follows the last one is taken for a document of its own.
        On a GPU the host waits for them.

        Raises:
            ValueError: a layout other than thd, or borders beyond the sequence.
        """
        if packed is None or (self.cp == 1 and not self.sequence_parallel):
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
                f"cu_seqlens end at {found[-1]}, but there are {length} tokens: use those of this batch"
            )
        return tuple(found) if found[-1] == length else (*found, length)
