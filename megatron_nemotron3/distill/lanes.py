"""Batches of the student as the teacher's layout takes them, and the teacher's hidden states back.

Used where the layouts differ. The ranks of each pipeline stage of the student hold one or more stages of the
teacher, side by side. The teacher has fewer data lanes: each takes the micro-batches of several lanes of the
student, one after the other. Tokens and borders, which are few, are gathered; hidden states go by a boundary
plan, each row once to every rank that needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
from megatron_nemotron3.distill.rows import all_gathered, borders_of, gathered, pack_of
from megatron_nemotron3.layers.context_parallel import cu_seqlens, zigzag

#: Arguments of a model's forward with one number for each token, [b, s / cp].
_BY_TOKEN = ("input_ids", "padding_mask")


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
        teacher, student: layouts; the PP of one is a multiple of the other's. Of a teacher with fewer stages
            it is the layout of one copy, whose stages lie on the ranks of one stage of the student each.
        groups: process groups of the student.
    """

    def __init__(self, teacher: ParallelLayout, student: ParallelLayout, groups: Any) -> None:
        self._dp, self._cp = groups.dp, groups.cp
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
        borders = [borders_of(pack, length)[1] for pack in packs]
        self._documents = tuple(
            tuple(ends) if pack else () for ends, pack in zip(borders, packs, strict=True)
        )
        names = [name for name in _BY_TOKEN if given.get(name) is not None]
        lanes: list[Tensor] = []
        if names:
            mine = torch.stack([given[name].long() for name in names])
            whole = gathered(mine.flatten(0, 1), borders[self._dp.rank()], self._cp)
            lanes = all_gathered(whole.view(*mine.shape[:2], length), self._dp)
        found = []
        for lane in self._mine:
            cut = zigzag(borders[lane], self._teacher.cp, self._context) if self._teacher.cp > 1 else None
            arguments: dict[str, Any] = {"packed_seq_params": packs[lane]}
            for i, name in enumerate(names):
                rows = lanes[lane][i].to(given[name].dtype)
                arguments[name] = rows if cut is None else rows[:, cut.to(rows.device)]
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

    def _packs(self, packed: PackedSeqParams | None, length: int) -> list[PackedSeqParams | None]:
        """The borders of the student's lanes; None for rows of one document."""
        if packed is None:
            return [None] * self._student.dp
        physical = cu_seqlens(packed)
        mine = physical.new_full((2, length + 2), -1)
        for place, borders in enumerate((packed.cu_seqlens_q, physical)):
            mine[place, : len(borders)] = borders
        found: list[PackedSeqParams | None] = []
        for rows in all_gathered(mine, self._dp):
            real, padded = (row[row >= 0] for row in rows)
            found.append(pack_of(padded if packed.cu_seqlens_q is physical else real, padded, length))
        return found


def _stage(layout: ParallelLayout, first: int) -> Layout:
    """One pipeline stage of a layout, whose ranks begin at `first`, as a module that sends or receives."""
    share = "zigzag" if layout.cp > 1 else ""
    return Layout((("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp)), first, share=share)
