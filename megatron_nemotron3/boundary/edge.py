"""One edge between two modules: its layouts, the tensors that it carries, and its plans."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.plan import TransferPlan, make_plan


@dataclass(frozen=True)
class Edge:
    """The connection from the last stage of one module to the first stage of another.

    ndim: dimensions of a tensor: 2 for [rows, hidden], or 3.
    batch_dimension: along which 3-D tensors of lanes are concatenated. The slice at one of its indices is
        called a row here.
    dtype: of the rows; None: that of the first exchange.
    hidden: width of a 2-D row; None: that of the first exchange.
    frozen: whether no module before this edge is trained, so that no gradient goes back.
    """

    source_name: str
    destination_name: str
    source: Layout
    destination: Layout
    ndim: int = 2
    batch_dimension: int = 0
    dtype: torch.dtype | None = None
    hidden: int | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        self.source.check_sender()

    @property
    def name(self) -> str:
        return f"{self.source_name} -> {self.destination_name}"

    @property
    def shares(self) -> int:
        """Number of equal shares of the samples that divides among the lanes of both sides."""
        return math.lcm(self.source.dp, self.destination.dp)

    @property
    def senders(self) -> tuple[tuple[int, ...], ...]:
        return self.source.lanes(self.source.pp - 1)

    @property
    def receivers(self) -> tuple[tuple[int, ...], ...]:
        return self.destination.lanes(0)

    @property
    def ranks(self) -> set[int]:
        return {rank for lane in (*self.senders, *self.receivers) for rank in lane}

    @functools.cached_property
    def shared(self) -> bool:
        """Whether a rank is on both sides; each rank is then sent all that it lacks, and none gather."""
        sending = {rank for lane in self.senders for rank in lane}
        return any(rank in sending for lane in self.receivers for rank in lane)

    @property
    def gathers(self) -> set[tuple[int, ...]]:
        """Groups of ranks that may gather rows: the ranks of a lane that have the same rows."""
        if self.shared:
            return set()
        sides = ((self.source, self.senders), (self.destination, self.receivers))
        found = {ranks for layout, lanes in sides for lane in lanes for ranks in layout.same_rows(lane)}
        return {ranks for ranks in found if len(ranks) > 1}

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Convert a module's tensor to contiguous rows [rows, ...]."""
        return tensor.movedim(self._axis(tensor), 0).contiguous()

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows.movedim(0, self._axis(rows)).contiguous()

    def _axis(self, tensor: Tensor) -> int:
        return 0 if tensor.ndim == 2 else self.batch_dimension

    def plan(self, counts: tuple[int, ...], row_bytes: int, microbatch: Microbatch | None) -> TransferPlan:
        """The forward plan of one microbatch; `TransferPlan.backward` is that of the gradients."""
        if self.source.cp > 1 and microbatch is None:
            raise ValueError(
                f"{self.source_name} ({self.source}) shares its rows by context parallelism, and its media "
                "are not known: set communicator.feed to a RowFeed"
            )
        if not self.destination.sliced:
            if self.source.cp == 1:
                microbatch = None  # plans of equal counts are equal
        elif not self.shared and (
            microbatch is None or not microbatch.lengths or microbatch.runs_of(self.source_name) is None
        ):
            raise ValueError(
                f"{self.destination_name} ({self.destination}) receives the rows of its own positions, which "
                "are not known: set communicator.feed to a RowFeed whose description has runs and lengths"
            )
        return _cached_plan(self, counts, row_bytes, microbatch)


@functools.lru_cache(maxsize=128)
def _cached_plan(
    edge: Edge, counts: tuple[int, ...], row_bytes: int, microbatch: Microbatch | None
) -> TransferPlan:
    layouts = edge.source, edge.destination
    if microbatch is None:
        return make_plan(*layouts, counts, row_bytes=row_bytes)
    return microbatch.plan(edge.source_name, *layouts, counts, row_bytes)
