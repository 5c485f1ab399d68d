"""Rows between modules that share ranks: upstream's `ColocatedBridgeCommunicator` for any two layouts.

The plans, of mode "copies", say which rows each rank lacks; exactly those are sent, forward and, in autograd,
backward. Lanes may be ragged or empty, and the receiving module may have pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.comm.colocated_communicator import BridgeDirection, ColocatedBridgeCommunicator
from torch import Tensor

from megatron_nemotron3.boundary.agreement import SPLIT_SIZES, Announcement
from megatron_nemotron3.boundary.coordinator import Agreed, Coordinator
from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.exchange import RankTransfer, exchange
from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.groups import Failure
from megatron_nemotron3.boundary.layout import Layout


class ColocatedBridge(ColocatedBridgeCommunicator):
    """Rows from an encoder to the language model on the same ranks.

    Every rank of the world constructs it, in one order, because process groups are created.

    Args:
        src_grid, dest_grid, src_module_name, dest_module_name, dim_mapping: as upstream. Row counts of a
            `Microbatch` are looked up under `src_module_name`.
        sequence_parallel: whether the destination uses `--sequence-parallel`.
        source_sequence_parallel: whether the source's rows are split over its TP; needs a feed.
        source_share: how the source's context ranks share its rows (`Layout.share`); needs a feed.
        groups_from: another communicator of the same ranks, whose process group is used; rows of both can go
            in one exchange. None: a new one.
        timeout: of every wait; None: that of the default group.
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
        source_share: str = "",
        groups_from: ColocatedBridge | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.src_module_name, self.dest_module_name = src_module_name, dest_module_name
        self.dim_mapping = dim_mapping or {"b": 0, "s": 1, "h": 2}
        self.current_rank = dist.get_rank()
        self.source = Layout.from_grid(src_grid, source_sequence_parallel, source_share)
        self.destination = Layout.from_grid(dest_grid, sequence_parallel)
        self._validate_grids()
        self._extract_parallelism_info()
        # Upstream's attributes: rank -> (data lane, tp index).
        self.rank_to_src_pos = _lane_and_tp(self.source)
        self.rank_to_dest_pos = _lane_and_tp(self.destination)
        self._set_direction()
        self._gather_pg: Any = None
        self._destroyed = False
        self.edge = Edge(
            src_module_name,
            dest_module_name,
            self.source,
            self.destination,
            batch_dimension=self.dim_mapping["b"],
        )
        self._owns_groups = groups_from is None
        self.coordinator: Coordinator = (
            groups_from.coordinator if groups_from else Coordinator([self.edge], timeout=timeout)
        )

    @property
    def failure(self) -> Failure:
        return self.coordinator.failure

    def communicate(
        self, tensor: Tensor, microbatch: Microbatch | None = None, *, backward: bool | None = None
    ) -> Tensor:
        """Send the rows of this rank's encoder lane; return those of its language model lane, or slice.

        Args:
            tensor: [rows, h], or three dimensions that are cut along `dim_mapping["b"]`; a sample is then a
                row.
            microbatch: its row counts. None: one header is exchanged, and without upstream's
                `_mimo_bridge_split_sizes` (rows of each sample) a lane's rows are cut into equal parts.
            backward: whether gradients come back, the same on all ranks. None: with a header, whether any
                rank's tensor requires a gradient; else whether this one does.
        """
        return communicate([ModalityRows(self, tensor, backward)], microbatch)[0]

    def _validate_grids(self) -> None:
        src, dest = self.src_grid, self.dest_grid
        if src.size != dest.size:
            raise ValueError(f"Grids must span same number of ranks: src={src.size}, dest={dest.size}")
        if src.rank_offset != dest.rank_offset:
            raise ValueError(f"Grids must have same rank offset: {src.rank_offset} and {dest.rank_offset}")
        for side, grid in (("src", src), ("dest", dest)):
            for required in ("tp", "dp"):
                if required not in grid.dim_names:
                    raise ValueError(f"{side} grid must have '{required}' dimension, got {grid.dim_names}")
        if self.source.pp != 1:
            raise ValueError(f"src PP must be 1 for modules that share ranks, got {self.source.pp}")
        try:
            self.source.check_sender()
        except ValueError as error:  # in upstream's wording
            raise ValueError(
                f"src CP must be 1, or it must be said how its ranks share rows: {error}"
            ) from None

    def _set_direction(self) -> None:
        """Set upstream's attributes, which other code and upstream's tests read; nothing here uses them."""
        src, dest = self.source.dp, self.destination.dp
        self.gather_group_ranks: list[list[int]] = []
        self.scale = max(src, dest) // min(src, dest)
        self.direction = BridgeDirection.EQUAL
        if src > dest:
            self.direction = BridgeDirection.FAN_IN
        elif dest > src:
            self.direction = BridgeDirection.FAN_OUT
        plain = self.destination.cp == self.destination.pp == 1
        if src != dest and max(src, dest) % min(src, dest) == 0 and plain:
            finer, positions = self.destination, self.rank_to_dest_pos
            if src > dest:
                finer, positions = self.source, self.rank_to_src_pos
            self.gather_group_ranks = self._build_gather_groups(
                min(src, dest), finer.tp, self.scale, positions
            )

    @property
    def gather_pg(self) -> Any:
        """Upstream's gather groups. Not needed here; created on all ranks when read."""
        if self._gather_pg is None and self.gather_group_ranks and not self._destroyed:
            self._gather_pg, _ = dist.new_subgroups_by_enumeration(self.gather_group_ranks)
        return self._gather_pg

    def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        if self._gather_pg is not None:
            dist.destroy_process_group(self._gather_pg)
            self._gather_pg = None
        if self._owns_groups:
            self.coordinator.close()


class ModalityRows(NamedTuple):
    """One modality of an exchange; `tensor`, `backward` as `ColocatedBridge.communicate` takes them.

    marked: without a feed, the number of positions for rows in each sample of this rank's destination lane,
        if known; ragged samples then need no `_mimo_bridge_split_sizes`.
    """

    comm: ColocatedBridge
    tensor: Tensor
    backward: bool | None = None
    marked: Sequence[int] | None = None


def communicate(modalities: Sequence[ModalityRows], microbatch: Microbatch | None = None) -> list[Tensor]:
    """Exchange the rows of several modalities at once."""
    coordinator = modalities[0].comm.coordinator
    names = [modality.comm.edge.source_name for modality in modalities]
    if len(set(names)) < len(names):
        raise ValueError(f"sources {names}: each bridge of an exchange needs a src_module_name of its own")
    offers = [
        Announcement(
            comm.edge,
            comm.edge.to_rows(tensor),
            getattr(tensor, SPLIT_SIZES, None),
            marked,
            tensor.requires_grad if backward is None else backward,
        )
        for comm, tensor, backward, marked in modalities
    ]
    agreed = coordinator.agree(offers, microbatch)
    back = [
        found.needs_gradient if modality.backward is None else modality.backward
        for modality, found in zip(modalities, agreed, strict=True)
    ]
    # The anchor requires a gradient, so each rank takes part in backward, whatever it sent.
    anchor = torch.empty(0, requires_grad=any(back))
    arrived = _Crossing.apply(coordinator, agreed, back, anchor, *(offer.rows for offer in offers))
    return [found.edge.from_rows(rows) for found, rows in zip(agreed, arrived, strict=True)]


class _Crossing(torch.autograd.Function):
    """Sends rows forward and gradients back, all modalities together."""

    @staticmethod
    def forward(
        ctx: Any,
        coordinator: Coordinator,
        agreed: Sequence[Agreed],
        back: Sequence[bool],
        anchor: Tensor,
        *rows: Tensor,
    ) -> tuple[Tensor | None, ...]:
        ctx.coordinator, ctx.agreed, ctx.back = coordinator, agreed, back
        transfers = [
            RankTransfer(found.plan, mine, True, found.kind, f"{found.edge.name}, forward")
            for found, mine in zip(agreed, rows, strict=True)
        ]
        arrived = exchange(transfers, coordinator.groups, coordinator.failure)
        ctx.mark_non_differentiable(*(out for out, need in zip(arrived, back, strict=True) if not need))
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chosen = [number for number, need in enumerate(ctx.back) if need]
        transfers = []
        for number in chosen:
            found, rows = ctx.agreed[number], grads[number].contiguous()
            name = f"{found.edge.name}, backward"
            transfers.append(RankTransfer(found.plan.backward, rows, True, found.kind, name))
        returned = exchange(transfers, ctx.coordinator.groups, ctx.coordinator.failure)
        by_number = dict(zip(chosen, returned, strict=True))
        return None, None, None, None, *(by_number.get(number) for number in range(len(ctx.back)))


def _lane_and_tp(layout: Layout) -> dict[int, tuple[int, int]]:
    return {rank: (layout.lane_of(rank), layout.coordinates(rank)["tp"]) for rank in layout.ranks}
