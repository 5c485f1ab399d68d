"""Batches of the student as the teacher's layout takes them, and the teacher's hidden states back.

Used where the layouts differ. The ranks of each pipeline stage of the student hold one or more stages of the
teacher, side by side. The teacher has fewer data lanes: each takes the micro-batches of several lanes of the
student, one after the other. Tokens and borders, which are few, are gathered; hidden states go by a boundary
plan, each row once to every rank that needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.boundary.all_to_all import deliver
from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.plan import Plan
from megatron_nemotron3.boundary.planner import make_plan, slices_of
from megatron_nemotron3.layers.context_parallel import cu_seqlens, zigzag

#: Arguments of a model's forward with one number for each token, [b, s / cp].
_BY_TOKEN = ("input_ids", "position_ids", "padding_mask")


@dataclass(frozen=True)
class Batch:
    """A micro-batch on one rank: the arguments of the model's forward, and its size there.

    tokens: s / cp.
    """

    arguments: dict[str, Any]
    tokens: int
    rows: int


class Lanes:
    """The teacher has a layout of its own on the ranks of each pipeline stage of the student.

    Every rank of the world constructs it, because process groups are created.

    Args:
        teacher, student: layouts; the PP of the first is a multiple of the other's.
        dp_cp: the student's process group of a stage's data and context ranks.
    """

    def __init__(self, teacher: ParallelLayout, student: ParallelLayout, dp_cp: Any) -> None:
        self._dp_cp = dp_cp
        rank, ranks = dist.get_rank(), student.world_size // student.pp
        here, own = rank // ranks * ranks, teacher.world_size // teacher.pp
        self._student = _stage(student, here)
        #: Hidden states leave the last stage of the teacher that lies here.
        self._teacher = _stage(teacher, here + ranks - own)
        # Rows leave the last stage only, but a group is made by all ranks.
        self._groups = Groups(range(student.world_size - ranks, student.world_size))
        at = _stage(teacher, rank // own * own).coordinates(rank)
        self._context, each = at["cp"], student.dp // teacher.dp
        #: Lanes of the student whose micro-batches this rank's lane of the teacher takes.
        self._mine = range(at["dp"] * each, (at["dp"] + 1) * each)
        self._plan = functools.lru_cache(maxsize=8)(self._make_plan)
        self._documents: tuple[tuple[int, ...], ...] = ()

    def batches(self, batch: Batch) -> list[Batch]:
        """The micro-batches that the teacher computes on this rank for one of the student.

        Raises:
            ValueError: there is an attention mask, or the rows do not divide among the teacher's ranks.
        """
        given, cp = batch.arguments, self._student.cp
        if given.get("attention_mask") is not None:
            raise ValueError(
                "a teacher in a layout of its own takes no attention mask: leave out "
                "--create-attention-mask-in-dataloader (the models are causal without it)"
            )
        length = batch.tokens * cp
        packs = self._packs(given.get("packed_seq_params"), length)
        borders = [cu_seqlens(pack).tolist() if pack else [0, length] for pack in packs]
        for ends in borders:  # what follows the last document is padding
            ends += [length] if ends[-1] < length else []
        self._documents = tuple(
            tuple(ends) if pack else () for ends, pack in zip(borders, packs, strict=True)
        )
        whole = self._whole(given, borders)
        found = []
        for lane in self._mine:
            cut = zigzag(borders[lane], self._teacher.cp, self._context) if self._teacher.cp > 1 else None
            arguments: dict[str, Any] = {"packed_seq_params": packs[lane]}
            for name in _BY_TOKEN:
                rows = whole[name][lane] if name in whole else None
                arguments[name] = rows if rows is None or cut is None else rows[:, cut.to(rows.device)]
            found.append(Batch(arguments, length // self._teacher.cp, batch.rows))
        return found

    def back(self, hidden: Sequence[Tensor], batch: Batch) -> Tensor:
        """Hidden states [s / cp, b, h] of the micro-batches, as the student's rank needs them."""
        held = torch.cat([one.transpose(0, 1).reshape(-1, one.shape[-1]) for one in hidden])
        length = batch.tokens * self._student.cp
        plan = self._plan(length, batch.rows, self._documents, held.shape[-1] * held.element_size())
        (rows,) = deliver([plan], [held.contiguous()], self._groups)
        return rows.view(batch.rows, batch.tokens, -1).transpose(0, 1)

    def everywhere(self, weight: Tensor | None, like: Tensor) -> Tensor:
        """Give a matrix of the teacher's last stage to all ranks of the student's last stage."""
        group, last = self._groups.group, self._groups.ranks[-1]
        shape: list[Any] = [None if weight is None else weight.shape]
        dist.broadcast_object_list(shape, src=last, group=group)
        weight = like.new_empty(shape[0]) if weight is None else weight
        dist.broadcast(weight, src=last, group=group)
        return weight

    def _make_plan(
        self, length: int, rows: int, documents: tuple[tuple[int, ...], ...], row_bytes: int
    ) -> Plan:
        """The plan of micro-batches of `rows` rows; `documents` are the borders of each lane's row, or ()."""
        samples = self._student.dp * rows
        cut = [documents[i // rows] for i in range(samples)]
        slices = slices_of(self._student, [((0, length),)] * samples, [length] * samples, cut)
        media = [[b - a for a, b in pairwise(ends)] or [length] for ends in cut]
        return make_plan(
            self._teacher,
            self._student,
            [length] * samples,
            row_bytes=row_bytes,
            slices=slices,
            media=media,
            mode="copies",
        )

    def _gathered(self, mine: Tensor) -> list[tuple[int, int, Tensor]]:
        """(lane, context rank, tensor) of every data and context rank of the student."""
        ranks = dist.get_process_group_ranks(self._dp_cp)
        parts = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(parts, mine.contiguous(), group=self._dp_cp)
        places = [self._student.coordinates(rank) for rank in ranks]
        return [(at["dp"], at["cp"], part) for at, part in zip(places, parts, strict=True)]

    def _packs(self, packed: PackedSeqParams | None, length: int) -> list[PackedSeqParams | None]:
        """The borders of the student's lanes; None for rows of one document."""
        if packed is None:
            return [None] * self._student.dp
        physical = cu_seqlens(packed)
        mine = physical.new_full((2, length + 2), -1)
        for place, borders in enumerate((packed.cu_seqlens_q, physical)):
            mine[place, : len(borders)] = borders
        found: dict[int, PackedSeqParams] = {}
        for lane, context, rows in self._gathered(mine):
            if context == 0:
                real, padded = (row[row >= 0] for row in rows)
                real = padded if packed.cu_seqlens_q is physical else real
                longest = int(padded.diff().max())
                found[lane] = PackedSeqParams(
                    qkv_format="thd",
                    cu_seqlens_q=real,
                    cu_seqlens_kv=real,
                    cu_seqlens_q_padded=padded,
                    cu_seqlens_kv_padded=padded,
                    max_seqlen_q=longest,
                    max_seqlen_kv=longest,
                    total_tokens=length,
                )
        return [found[lane] for lane in range(self._student.dp)]

    def _whole(self, given: Mapping[str, Any], borders: list[list[int]]) -> dict[str, list[Tensor]]:
        """The rows [b, s] of every lane, by argument."""
        names = [name for name in _BY_TOKEN if given.get(name) is not None]
        if not names:
            return {}
        mine = torch.stack([given[name].long() for name in names])
        rows: dict[int, Tensor] = {}
        for lane, context, part in self._gathered(mine):
            cp = self._student.cp
            if lane not in rows:
                rows[lane] = part.new_empty(*part.shape[:-1], part.shape[-1] * cp)
            at = slice(None) if cp == 1 else zigzag(borders[lane], cp, context, part.device)
            rows[lane][..., at] = part
        return {
            name: [rows[lane][i].to(given[name].dtype) for lane in range(self._student.dp)]
            for i, name in enumerate(names)
        }


def _stage(layout: ParallelLayout, first: int) -> Layout:
    """One pipeline stage of a layout, whose ranks begin at `first`, as a module that sends or receives."""
    share = "zigzag" if layout.cp > 1 else ""
    return Layout((("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp)), first, share=share)
