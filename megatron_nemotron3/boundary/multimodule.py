"""Upstream's `MultiModulePipelineCommunicator` over our exchange, for the stock pipeline schedule.

Every edge into a module takes part in one exchange, layouts may have any relation, and when something is
wrong every rank raises a BoundaryError. Stages are counted from the end of the pipeline: the last stages of
all modules that feed the same module have the same number. Upstream counts from the start, which gives a
shallow encoder one warm-up microbatch more than the next module can take, and 1F1B hangs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import multimodule_communicator as stock
from torch import Tensor

from megatron_nemotron3.boundary.bridge import Bridge, dimensions
from megatron_nemotron3.boundary.coordinator import Coordinator, require_same_edges
from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.feed import FeedStream, RowFeed
from megatron_nemotron3.boundary.groups import BoundaryError, Failure
from megatron_nemotron3.boundary.layout import Layout

Layouts = Mapping[str, Layout]
#: module -> modules that receive its output.
Topology = Mapping[str, Sequence[str]]


class BoundaryCommunicator(stock.MultiModulePipelineCommunicator):
    """Sends rows and gradients between modules, and activations and gradients between stages of one module.

    Keep what was sent and received until its gradient has been exchanged, as the stock schedule does: when
    the next forward exchange begins, a microbatch whose tensors were released counts as run forward only.

    Args:
        module_to_grid_map, topology, config, dim_mapping, module_output_ndim: as upstream, the same on every
            rank. `config.pipeline_dtype` is the dtype of all rows.
        sequence_parallel: modules whose rows at the boundary are split over TP. Each rank of a sending module
            sends its part of the rows; each rank of a receiving module receives the rows of its own
            positions, which needs a feed. With CP above 1 it does so in any case.
        share: sending module with CP above 1 -> how its context ranks share its rows (`Layout.share`).
        frozen: source modules without trained parameters; no gradient goes back to them.
        hidden_size: expected width of rows; None: not checked.
        timeout: of every wait at a boundary; None: that of the default process group.

    Raises:
        BoundaryError: the same on every rank: the modules cannot run as one pipeline
            (`check_modules`), ranks were given different arguments, or a method fails.
        ValueError: an invalid argument.
    """

    def __init__(
        self,
        module_to_grid_map: dict[str, HyperCommGrid],
        topology: dict[str, list[str]],
        config: ModelParallelConfig,
        dim_mapping: dict[str, int] | None = None,
        module_output_ndim: dict[str, int] | None = None,
        *,
        sequence_parallel: Collection[str] = (),
        share: Mapping[str, str] | None = None,
        frozen: Collection[str] = (),
        hidden_size: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._layouts = {
            name: Layout.from_grid(grid, name in sequence_parallel, (share or {}).get(name, ""))
            for name, grid in module_to_grid_map.items()
        }
        check_modules(self._layouts, topology, dist.get_world_size(), frozen)
        self._frozen = frozenset(frozen)
        self._hidden_size, self._timeout = hidden_size, timeout
        self._coordinators: dict[str, Coordinator] = {}
        self.failure = Failure(self._abort)
        super().__init__(module_to_grid_map, topology, config, dim_mapping, module_output_ndim)

    def _build_bridge_comms(self) -> None:
        names = list(self.module_to_grid_map)
        everywhere = [
            self._edge(name, after) for name in names for after in dict.fromkeys(self.topology[name])
        ]
        # On all ranks of the world, including those without a boundary.
        require_same_edges(everywhere, range(dist.get_world_size()), self.failure)
        for destination in names:
            edges = [edge for edge in everywhere if edge.destination_name == destination]
            if not edges:
                continue
            coordinator = self._coordinators[destination] = Coordinator(
                edges, failure=self.failure, timeout=self._timeout
            )
            self.bridge_comms += [
                Bridge(
                    self.module_to_grid_map[edge.source_name],
                    self.module_to_grid_map[destination],
                    self.dim_mapping,
                    edge.dtype,
                    edge.source_name,
                    destination,
                    edge.ndim,
                    edge=edge,
                    coordinator=coordinator,
                )
                for edge in edges
            ]

    def _edge(self, source: str, destination: str) -> Edge:
        ndim = self.module_output_ndim.get(source, 3)
        axes = dimensions(self.dim_mapping, ndim)
        return Edge(
            source,
            destination,
            self._layouts[source],
            self._layouts[destination],
            ndim,
            axes["b"] if ndim == 3 else 0,
            self.config.pipeline_dtype,
            self._hidden_size,
            source in self._frozen,
        )

    @property
    def feed(self) -> RowFeed | None:
        """Feed of the training batches; set it on every boundary rank or on none."""
        return next((coordinator.training.feed for coordinator in self._coordinators.values()), None)

    @feed.setter
    def feed(self, feed: RowFeed | None) -> None:
        for coordinator in self._coordinators.values():
            coordinator.training = FeedStream(feed)

    @property
    def evaluation_feed(self) -> RowFeed | None:
        """Feed of the evaluation batches, used while gradients are disabled."""
        return next((coordinator.evaluation.feed for coordinator in self._coordinators.values()), None)

    @evaluation_feed.setter
    def evaluation_feed(self, feed: RowFeed | None) -> None:
        for coordinator in self._coordinators.values():
            coordinator.evaluation = FeedStream(feed)

    @property
    def current_stage(self) -> int:
        return stage_of(self.current_rank, self._layouts, self.topology)

    def _abort(self) -> None:
        for coordinator in self._coordinators.values():
            coordinator.abort()

    def close(self) -> None:
        """Release the process groups. Call it on every rank."""
        for coordinator in self._coordinators.values():
            coordinator.close()

    def recv_forward(
        self, tensor_shape: Any = None, is_first_stage: bool = False
    ) -> dict[str, Tensor | list[Tensor]]:
        """Receive the input of this stage: source module -> rows, or own module -> activations."""
        return self._at_input(None, tensor_shape, forward=True)

    def send_forward(self, output_dict: dict[str, Tensor], is_last_stage: bool = False) -> None:
        """Send the output of this stage: own module -> tensor."""
        self._at_output(output_dict, None, backward=False)

    def send_forward_recv_backward(
        self, output_dict: dict[str, Tensor], tensor_shape: Any = None, is_last_stage: bool = False
    ) -> dict[str, Any]:
        return self._at_output(output_dict, tensor_shape, backward=True)

    def send_backward_recv_forward(
        self, grad_dict: dict[str, Tensor], tensor_shape: Any = None, is_first_stage: bool = False
    ) -> dict[str, Any]:
        return self._at_input(grad_dict, tensor_shape, forward=True)

    def recv_backward(self, tensor_shape: Any = None, is_last_stage: bool = False) -> dict[str, Any]:
        """Receive the gradient of the oldest output: own module -> gradient."""
        return self._at_output(None, tensor_shape, backward=True)

    def send_backward(self, grad_dict: dict[str, Tensor], is_first_stage: bool = False) -> None:
        """Send gradients of the oldest inputs: source module -> gradient."""
        self._at_input(grad_dict, None, forward=False)

    def _at_input(self, gradients: Mapping[str, Any] | None, shape: Any, *, forward: bool) -> dict[str, Any]:
        """Communicate at the stage's input: send gradients unless None, receive inputs if `forward`."""
        self.failure.check()
        found: dict[str, Any] = {}
        for name, module in self.rank_module_map.items():
            if module.pp_rank > 0:
                sends = "backward" if gradients is not None else ""
                receives = "forward" if forward else ""
                tensor = (gradients or {}).get(name)
                received = self._between_stages(name, sends, receives, tensor, shape)
                if forward:
                    found[name] = received
        for name, coordinator in self._coordinators.items():
            module = self.rank_module_map.get(name)
            if module is not None and module.pp_rank == 0:
                back = gradients is not None
                if forward:
                    coordinator.drop_forward_only()
                found |= coordinator.run(None, gradients, forward=forward, backward=back)[0]
        return found

    def _at_output(self, outputs: Any, shape: Any, *, backward: bool) -> dict[str, Any]:
        """Communicate at the stage's output: send outputs unless None, receive gradients if `backward`."""
        self.failure.check()
        found: dict[str, Any] = {}
        last = set()
        if isinstance(outputs, Tensor):  # the loss, which is not sent
            outputs = {}
        for name, module in self.rank_module_map.items():
            output = self._detached_if_frozen(name, module, (outputs or {}).get(name))
            if module.pp_rank == module.pp_size - 1:
                last.add(name)
                continue
            sends, receives = "forward" if outputs is not None else "", "backward" if backward else ""
            received = self._between_stages(name, sends, receives, output, shape)
            if backward:
                found[name] = received
        for coordinator in self._coordinators.values():
            if any(edge.source_name in last for edge in coordinator.edges):
                ahead = outputs is not None
                if ahead:
                    coordinator.drop_forward_only()
                gradients = coordinator.run(outputs, None, forward=ahead, backward=backward)[1]
                for name, gradient in gradients.items():
                    # A module that feeds two others gets the sum of their gradients, as in autograd.
                    both = found.get(name) is not None and gradient is not None
                    found[name] = found[name] + gradient if both else gradient
        return found

    def _detached_if_frozen(self, name: str, module: stock.RankModuleInfo, output: Any) -> Any:
        """Detach the output of a frozen module, whose gradient would never be received."""
        if name in self._frozen and isinstance(output, Tensor) and output.requires_grad:
            # Later stages require one because the schedule makes their input require a gradient.
            if module.pp_rank == 0 and not module.bridge_comms_as_dest_module:
                self.failure.fail(
                    f"{name} is frozen, but its output requires a gradient: take it out of frozen=, or run "
                    "the module under torch.no_grad()"
                )
            with self.failure.guarded(lambda: f"detached the output of {name}, which must not be a view"):
                output.detach_()
        return output

    def _between_stages(self, name: str, sends: str, receives: str, tensor: Any, shape: Any) -> Any:
        if name in self._frozen:
            sends, receives = (way if way == "forward" else "" for way in (sends, receives))
        if not sends and not receives:
            return None
        method = "_".join(f"{verb}_{way}" for verb, way in (("send", sends), ("recv", receives)) if way)
        arguments: dict[str, Any] = {"tensor_shapes": shape} if receives else {}
        # Upstream skips the call on the first or last stage of a pipeline; this stage always has a neighbor.
        ahead = method in ("send_forward", "recv_backward", "send_forward_recv_backward")
        arguments["is_last_stage" if ahead else "is_first_stage"] = False
        call = getattr(self.rank_module_map[name].p2p_communicator, method)
        with self.failure.guarded(lambda: f"{name}: waited for the next stage ({sends}, {receives})"):
            tensors = (stock._prepare_tensor_for_comm(tensor),) if sends else ()
            received = call(*tensors, **arguments)
            return stock._restore_tensor_from_comm(received) if receives else None


def check_modules(
    layouts: Layouts, topology: Topology, world_size: int, frozen: Collection[str] = ()
) -> None:
    """Refuse modules that would hang later. All ranks raise the same error."""
    for name, destinations in topology.items():
        if unknown := {name, *destinations} - layouts.keys():
            raise BoundaryError(f"modules {sorted(unknown)} have no grid, only {sorted(layouts)} have")
    if missing := layouts.keys() - topology.keys():
        raise BoundaryError(
            f"modules {sorted(missing)} are not in the topology: add a list for each, possibly empty"
        )
    modules_of: dict[int, list[str]] = {}
    for name, layout in layouts.items():
        for rank in layout.ranks:
            modules_of.setdefault(rank, []).append(name)
    if beyond := sorted(rank for rank in modules_of if rank >= world_size):
        raise BoundaryError(f"ranks {beyond} of the layouts do not exist: the world has {world_size}")
    for name, destinations in topology.items():
        after = {other: remaining(other, layouts, topology) for other in destinations}
        for destination in destinations:
            if after[destination] < max(after.values()):
                raise BoundaryError(
                    f"{name} feeds modules at different distances from the end {after}: the schedule has one "
                    "stage for each rank; pass what the later one needs through the earlier one"
                )
            if shared := set(layouts[name].ranks) & set(layouts[destination].ranks):
                raise BoundaryError(
                    f"{name} and {destination} share ranks {sorted(shared)}: modules on the same ranks are "
                    "colocated, use BoundaryMimoModel; or give them disjoint ranks"
                )
            if destination in frozen and name not in frozen:
                raise BoundaryError(
                    f"{destination} is frozen, but {name} before it is trained: freeze both, or train both"
                )
    for rank, names in sorted(modules_of.items()):
        stages = {name: _module_stage(rank, name, layouts, topology) for name in names}
        if len(set(stages.values())) > 1:
            raise BoundaryError(
                f"rank {rank} is at different stages of the pipeline with its modules {stages}: give modules "
                "that share ranks one pipeline depth"
            )


def remaining(module: str, layouts: Layouts, topology: Topology, above: tuple[str, ...] = ()) -> int:
    """Number of stages from the first one of a module to the end of the pipeline."""
    if module in above:
        raise BoundaryError(f"modules feed each other in a circle: {' -> '.join([*above, module])}")
    after = [remaining(name, layouts, topology, (*above, module)) for name in topology.get(module, ())]
    return layouts[module].pp + max(after, default=0)


def stage_of(rank: int, layouts: Layouts, topology: Topology) -> int:
    """Pipeline stage of a rank; 0 is the start of the longest path, and of a rank in no module."""
    stages = (_module_stage(rank, name, layouts, topology) for name in layouts if rank in layouts[name].ranks)
    return next(stages, 0)


def _module_stage(rank: int, module: str, layouts: Layouts, topology: Topology) -> int:
    total = max(remaining(name, layouts, topology) for name in layouts)
    left = remaining(module, layouts, topology) - layouts[module].coordinates(rank).get("pp", 0)
    return total - left
