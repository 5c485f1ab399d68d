"""Upstream's `BridgeCommunicator` over the exchange of this package: one edge between two modules.

Every boundary rank sends and receives its own part, so upstream's `comm_map` is empty here.
"""

from __future__ import annotations

import functools
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from torch import Tensor

from megatron_nemotron3.boundary.coordinator import Coordinator
from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.groups import BoundaryError
from megatron_nemotron3.boundary.layout import Layout


class Bridge(BridgeCommunicator):
    """Sends rows from the last stage of one module to the first stage of another, and gradients back.

    Args:
        src_grid, dest_grid, dim_mapping, comm_dtype, src_module_name, dest_module_name, tensor_ndim: as
            upstream. CP of the destination may be above 1.
        source_share: how the source's context ranks share its rows (`Layout.share`); needs a feed.
        edge, coordinator: given by `BoundaryCommunicator`, where all edges into a module share one
            coordinator; then only its methods exchange.
        timeout: of every wait; None: that of the default process group.

    Raises:
        BoundaryError: ranks construct it with different arguments; or a method fails, on every rank.
        ValueError: as `Edge`, another argument is invalid, or a method is called on a rank of another grid.
    """

    #: Bridges with process groups of their own, for `destroy_bridge_pgs`.
    _alive: weakref.WeakSet[Bridge] = weakref.WeakSet()

    def __init__(
        self,
        src_grid: HyperCommGrid,
        dest_grid: HyperCommGrid,
        dim_mapping: dict[str, int] | None = None,
        comm_dtype: torch.dtype | None = None,
        src_module_name: str | None = None,
        dest_module_name: str | None = None,
        tensor_ndim: int = 3,
        *,
        source_share: str = "",
        edge: Edge | None = None,
        coordinator: Coordinator | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.src_module_name, self.dest_module_name = src_module_name, dest_module_name
        self.comm_dtype, self.tensor_ndim = comm_dtype, tensor_ndim
        self.dim_mapping = dimensions(dim_mapping, tensor_ndim)
        self.current_rank = dist.get_rank()
        self.comm_map: dict[int, Any] = {}
        self.src_tp_leaders, self.src_local_leader_rank = self.get_leader_rank(src_grid, is_src=True)
        self.dest_tp_leaders, self.dest_local_leader_rank = self.get_leader_rank(dest_grid, is_src=False)
        self.edge = edge or Edge(
            src_module_name or "source",
            dest_module_name or "destination",
            Layout.from_grid(src_grid, share=source_share),
            Layout.from_grid(dest_grid),
            tensor_ndim,
            self._batch_dim,
            comm_dtype,
        )
        self.coordinator = coordinator or Coordinator([self.edge], timeout=timeout)
        if coordinator is None:
            Bridge._alive.add(self)

    @functools.cached_property
    def bridge_pg(self) -> Any:
        """Upstream's group of the leaders of both sides. Not needed here; created on all ranks when read."""
        return self._get_or_create_bridge_pg(sorted({*self.src_tp_leaders, *self.dest_tp_leaders}))

    def close(self) -> None:
        """Release the process groups. Call it on every rank, in one order."""
        self.coordinator.close()
        Bridge._alive.discard(self)

    @classmethod
    def destroy_broadcast_pgs(cls) -> None:
        """There are no broadcast groups. See `destroy_bridge_pgs`."""

    @classmethod
    def destroy_bridge_pgs(cls) -> None:
        """Close all bridges that were constructed alone, in the order of construction, and leader groups."""
        for bridge in sorted(cls._alive, key=lambda bridge: bridge.coordinator.number):
            bridge.close()
        super().destroy_bridge_pgs()

    def send_forward(self, tensor_to_send: Tensor) -> None:
        """Send this rank's part of the output: [rows, hidden], or 3-D with samples along axis "b"."""
        self._exchange("send_forward", tensor_to_send)

    def recv_forward(self) -> Tensor:
        """Receive a tensor that requires a gradient."""
        return self._exchange("recv_forward")

    def send_backward(self, grad_tensor: Tensor) -> None:
        """Send the gradient of the oldest received tensor."""
        self._exchange("send_backward", grad_tensor)

    def recv_backward(self) -> Tensor:
        """Receive the gradient of the oldest sent tensor."""
        return self._exchange("recv_backward")

    def send_forward_recv_backward(
        self, input_tensor: Tensor, grad_shape: tuple[int, ...] | None = None
    ) -> Tensor:
        return self._exchange("send_forward_recv_backward", input_tensor)

    def send_backward_recv_forward(
        self, grad_tensor: Tensor, forward_shape: tuple[int, ...] | None = None
    ) -> Tensor:
        return self._exchange("send_backward_recv_forward", grad_tensor)

    def _exchange(self, method: str, tensor: Tensor | None = None) -> Any:
        of_source = method.startswith("send_forward") or method == "recv_backward"
        grid, side = (self.src_grid, "source") if of_source else (self.dest_grid, "destination")
        if not self.is_current_rank_in_grid(grid):
            raise ValueError(
                f"rank {self.current_rank} is not in the {side} grid: call {method} on its ranks only"
            )
        if len(self.coordinator.edges) > 1:
            raise BoundaryError(
                f"{len(self.coordinator.edges)} edges lead to {self.edge.destination_name} and exchange "
                "together: use the methods of BoundaryCommunicator"
            )
        if not self.coordinator.groups.is_member:
            return None  # a middle stage of its module
        name = self.edge.source_name
        inputs, gradients = self.coordinator.run(
            {name: tensor} if of_source else {},
            {} if of_source else {name: tensor},
            forward="forward" in method,
            backward="backward" in method,
        )
        return gradients.get(name) if of_source else inputs.get(name)


def dimensions(mapping: dict[str, int] | None, ndim: int) -> dict[str, int]:
    """Upstream's `dim_mapping`, or its default; ValueError for other keys, axes or numbers of dimensions."""
    if ndim not in (2, 3):
        raise ValueError(f"tensor_ndim={ndim}: use 2 or 3")
    if mapping is None:
        return {"s": 1, "b": 0, "h": 2}
    if set(mapping) != {"s", "b", "h"} or not set(mapping.values()) <= {0, 1, 2}:
        raise ValueError(f"dim_mapping={mapping}: give the axes 0, 1, 2 of s, b, h")
    return mapping
