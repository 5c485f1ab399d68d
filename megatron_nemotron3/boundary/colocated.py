"""Rows between modules that share ranks: upstream's `ColocatedBridgeCommunicator` for any two layouts.

Upstream gathers whole lanes among siblings and wants equal rows per lane, dividing DP, CP 1 and PP 1. Here
the same plans as between disjoint modules say which rows each rank lacks: those, and no others, go in one
all-to-all, forward and backward. Ragged and empty lanes, any TP and DP, sequence and context parallelism and
pipeline stages of the module that receives are the same case. Nothing is scaled or summed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from megatron.core.hyper_comm_grid import HyperCommGrid
from torch import Tensor

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.agree import agree
from megatron_nemotron3.boundary.cross import Cross, Route
from megatron_nemotron3.boundary.failure import Failure
from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.samples import contiguous, lane_rows, segments
from megatron_nemotron3.boundary.siblings import Siblings
from megatron_nemotron3.boundary.sides import crossing, sending, slices_of
from megatron_nemotron3.boundary.transfer import Group, Plan

#: (dtype, shape of a row).
Kind = tuple[torch.dtype, tuple[int, ...]]


class Colocated(Siblings):
    """From an encoder to the language model on the same ranks.

    Constructed on every rank of the world, in one order: process groups are made.

    Args:
        src_grid, dest_grid, src_module_name, dest_module_name, dim_mapping: as upstream. Row counts of a
            `Microbatch` are looked up under `src_module_name`.
        sequence_parallel: the destination is (`--sequence-parallel`).
        source_sequence_parallel: the source's rows are split over its TP; a feed must tell their number.
        kind: dtype and shape of a row that every rank sends; None: agreed upon in the first exchange.
        shares: another of the same ranks, whose process group this one uses, too.
        timeout: of every wait; None: that of the default group.

    Raises:
        ValueError: the grids are not of the same ranks, have no tp or dp, or the source has PP or CP.
    """

    def __init__(
        self,
        src_grid: HyperCommGrid,
        dest_grid: HyperCommGrid,
        src_module_name: str = "src",
        dest_module_name: str = "dest",
        dim_mapping: dict[str, int] | None = None,
        *,
        sequence_parallel: bool = False,
        source_sequence_parallel: bool = False,
        kind: Kind | None = None,
        shares: Colocated | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._describe(
            src_grid,
            dest_grid,
            src_module_name,
            dest_module_name,
            dim_mapping,
            Layout.from_grid(src_grid, source_sequence_parallel),
            Layout.from_grid(dest_grid, sequence_parallel),
        )
        self._kind = kind
        self._owns = shares is None
        if shares is None:
            self.groups = Groups(self.source.ranks, timeout=timeout)
            self.failure = Failure(self.source.ranks, self.groups.abort)
        else:
            self.groups, self.failure = shares.groups, shares.failure
        self._route = functools.lru_cache(maxsize=32)(self._planned)

    def delivers_slices(self, microbatch: Microbatch | None) -> bool:
        """Whether ranks of the destination get just the rows of their own positions."""
        known = microbatch is not None and microbatch.runs_of(self.src_module_name) is not None
        return self.destination.sliced and known

    def communicate(
        self, tensor: Tensor, microbatch: Microbatch | None = None, *, backward: bool | None = None
    ) -> Tensor:
        """Rows of this rank's encoder lane -> rows that this rank's language model lane, or slice, takes.

        Args:
            tensor: [rows, h], or three dimensions of which `dim_mapping["b"]` is cut, a sample being a row.
            microbatch: how many rows there are; None: one header is exchanged, and without upstream's
                `_mimo_bridge_split_sizes` (rows of each sample) a lane's rows are cut into equal parts.
            backward: whether gradients come back, the same on all ranks; None: whether any rank's tensor
                requires one if a header is exchanged, else whether this one does.

        Raises:
            BoundaryError: rows, dtype or width are not what was agreed; the same on every rank.
        """
        return communicate([Part(self, tensor, backward)], microbatch)[0]

    def _prepare(self, part: Part, microbatch: Microbatch | None) -> tuple[Route, Tensor, bool]:
        """The route, the rows [n, ...] and whether gradients come back."""
        tensor, backward = part.tensor, part.backward
        batch = self.dim_mapping["b"] if tensor.ndim != 2 else 0
        rows = tensor.movedim(batch, 0).contiguous()
        kind = rows.dtype, tuple(rows.shape[1:])
        need = backward if backward is not None else tensor.requires_grad
        with self.failure.guarded(lambda: f"the header of {self.src_module_name} rows"):
            if microbatch is None or self._kind is None:
                sizes = getattr(tensor, "_mimo_bridge_split_sizes", None)
                counted, need_any = agree(self, rows, need, sizes, part.marked, microbatch is None)
                self._kind = kind
                need = need_any if backward is None else backward
                if microbatch is None:
                    microbatch = Microbatch.of({self.src_module_name: counted})
        assert microbatch is not None
        route = self._route(microbatch, _row_bytes(kind))
        expected = route.forward.rows_held(self.current_rank)
        if (len(rows), kind) != (expected, self._kind):
            self.failure.fail(
                f"{self.src_module_name} gave {_words(len(rows), kind)}, expected were "
                f"{_words(expected, self._kind)}: the counts of the feed and the encoder's input must be of "
                "the same samples, and all lanes of one dtype and width"
            )
        return route, rows, need

    def _planned(self, microbatch: Microbatch, row_bytes: int) -> Route:
        name = self.src_module_name
        known = dict(microbatch.rows)
        if name not in known:
            raise ValueError(f"the feed describes {sorted(known)}, but not {name!r}: its `describe` must")
        rows = known[name]
        if self.delivers_slices(microbatch):
            runs = microbatch.runs_of(name)
            assert runs is not None
            wants = slices_of(
                self.destination, runs, microbatch.lengths, documents=microbatch.documents or None
            )
            plan = crossing(
                self.source, self.destination, rows, row_bytes=row_bytes, wants=wants, mode="copies"
            )
            return Route(plan)
        given, taken = contiguous(len(rows), self.source.dp), contiguous(len(rows), self.destination.dp)
        lanes = zip(self.destination.lanes(0), lane_rows(rows, taken), strict=True)
        return Route(
            Plan(
                sending(self.source, lane_rows(rows, given)),
                tuple((Group(ranks, intervals.whole(n)),) for ranks, n in lanes),
                segments(rows, given, taken),
                row_bytes,
                "copies",
            )
        )

    def destroy(self) -> None:
        """Give the process groups back; upstream's one, too, if it was made."""
        if self._destroyed:
            return
        self._destroyed = True
        self._close_siblings()
        if self._owns:
            self.groups.close()


class Part(NamedTuple):
    """One modality of an exchange; `tensor`, `backward` as `Colocated.communicate` takes them.

    marked: where there is no feed, how many rows each sample of this rank's destination lane asks for, if it
        is known: then ragged samples need no `_mimo_bridge_split_sizes`.
    """

    comm: Colocated
    tensor: Tensor
    backward: bool | None = None
    marked: Sequence[int] | None = None


def communicate(parts: Sequence[Part], microbatch: Microbatch | None = None) -> list[Tensor]:
    """Several modalities in one exchange.

    Args:
        parts: in one order on all ranks.

    Raises:
        BoundaryError: as `Colocated.communicate`.
    """
    prepared = [part.comm._prepare(part, microbatch) for part in parts]
    arrived: dict[int, Tensor] = {}
    kinds = [(rows.dtype, rows.shape[1:]) for _, rows, _ in prepared]
    for kind in dict.fromkeys(kinds):
        chosen = [i for i, k in enumerate(kinds) if k == kind]
        routes, rows, back = zip(*(prepared[i] for i in chosen), strict=True)
        comm = parts[chosen[0]].comm
        # With an anchor that requires a gradient, each rank takes part in backward, whatever it sent.
        anchor = torch.empty(0, requires_grad=any(back))
        out = Cross.apply(comm.groups, comm.failure, routes, back, anchor, *rows)
        arrived |= dict(zip(chosen, out, strict=True))
    return [
        arrived[i].movedim(0, part.comm.dim_mapping["b"]).contiguous() if arrived[i].ndim != 2 else arrived[i]
        for i, part in enumerate(parts)
    ]


def _row_bytes(kind: Kind) -> int:
    return kind[0].itemsize * torch.Size(kind[1]).numel()


def _words(rows: int, kind: Kind | None) -> str:
    assert kind is not None
    return f"{rows} rows of {list(kind[1])} in {kind[0]}"
