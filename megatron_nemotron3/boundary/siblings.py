"""What upstream's `ColocatedBridgeCommunicator` shows of itself; nothing here is decided by it.

Upstream moves rows among siblings: the fine lanes of one coarse lane. Their ranks, and the words for the
direction, are attributes that other code and upstream's tests read.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.comm.colocated_communicator import BridgeDirection, ColocatedBridgeCommunicator

from megatron_nemotron3.boundary.layout import Layout


class Siblings(ColocatedBridgeCommunicator):
    """Base of `Colocated`."""

    def _describe(
        self,
        src_grid: HyperCommGrid,
        dest_grid: HyperCommGrid,
        src_module_name: str,
        dest_module_name: str,
        dim_mapping: dict[str, int] | None,
        source: Layout,
        destination: Layout,
    ) -> None:
        """Set upstream's attributes.

        Raises:
            ValueError: the grids are not of the same ranks, have no tp or dp, or the source has PP or CP.
        """
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.src_module_name, self.dest_module_name = src_module_name, dest_module_name
        self.dim_mapping = dim_mapping or {"b": 0, "s": 1, "h": 2}
        self.current_rank = dist.get_rank()
        self.source, self.destination = source, destination
        self._validate_grids()
        self._extract_parallelism_info()
        self._build_rank_mappings()
        self._describe_direction()
        self._gather_pg: Any = None
        self._destroyed = False

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
        for name, size in (("PP", self.source.pp), ("CP", self.source.cp)):
            if size != 1:
                raise ValueError(f"src {name} must be 1 for modules that share ranks, got {size}")

    def _build_rank_mappings(self) -> None:
        """Upstream's attributes: rank -> (data lane, tp index)."""
        self.rank_to_src_pos = _places(self.source)
        self.rank_to_dest_pos = _places(self.destination)

    def _describe_direction(self) -> None:
        """Upstream's attributes; nothing here is decided by them."""
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
            fine, place = (
                (self.source, self.rank_to_src_pos)
                if src > dest
                else (self.destination, self.rank_to_dest_pos)
            )
            self.gather_group_ranks = self._build_gather_groups(min(src, dest), fine.tp, self.scale, place)

    @property
    def gather_pg(self) -> Any:
        """Upstream's groups of siblings, not needed here: made, on all ranks, when asked for."""
        if self._gather_pg is None and self.gather_group_ranks and not self._destroyed:
            self._gather_pg, _ = dist.new_subgroups_by_enumeration(self.gather_group_ranks)
        return self._gather_pg

    def _close_siblings(self) -> None:
        if self._gather_pg is not None:
            dist.destroy_process_group(self._gather_pg)
            self._gather_pg = None


def _places(layout: Layout) -> dict[int, tuple[int, int]]:
    return {
        rank: (lane, layout.coordinates(rank)["tp"])
        for stage in range(layout.pp)
        for lane, ranks in enumerate(layout.lanes(stage))
        for rank in ranks
    }
