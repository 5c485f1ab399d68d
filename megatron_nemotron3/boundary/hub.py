"""All edges into one module: one exchange for each microbatch and direction, whatever comes from where."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.edge import Edge, Plans
from megatron_nemotron3.boundary.exchange import Leg, Pending, exchange
from megatron_nemotron3.boundary.failure import Failure
from megatron_nemotron3.boundary.feed import Microbatch, Stream
from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.boundary.inquiry import ask_backward, ask_forward

_numbers = itertools.count()


class Agreed(NamedTuple):
    """What both sides of an edge found a row to be."""

    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Of a row."""
        return math.prod(self.row) * self.dtype.itemsize


class _Crossed(NamedTuple):
    """A microbatch whose gradients have not come back."""

    plans: Plans
    agreed: Agreed


class Hub:
    """The ranks at the boundary of one module with those it takes rows from.

    Constructed by every rank of the world, in one order.

    Args:
        edges: with the same destination, in the same order everywhere.
        failure: shared with other hubs, whose owner compares edges (`same_everywhere`); None: its own.

    Raises:
        BoundaryError: ranks were given different edges.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        *,
        failure: Failure | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.edges = tuple(edges)
        self.number = next(_numbers)
        ranks = sorted({rank for edge in edges for rank in edge.ranks})
        gathers = sorted({gather for edge in edges for gather in edge.gathers})
        self.groups = Groups(ranks, gathers, backend=backend, timeout=timeout)
        self._pending = Pending()
        self.failure = failure or Failure(ranks, self.abort)
        self.training, self.evaluation = Stream(), Stream()
        self._agreed: dict[Edge, Agreed] = {}
        self._crossed: dict[Edge, deque[_Crossed]] = {edge: deque() for edge in edges}
        self._exchanges = {"forward": 0, "backward": 0}
        if failure is None and self.groups.is_member:
            with self.failure.guarded(lambda: f"waited for the edges of ranks {ranks}"):
                said: list[str] = [""] * len(ranks)
                dist.all_gather_object(said, repr(self.edges), group=self.groups.hub)
            same_everywhere(said, ranks, self.failure)

    def abort(self) -> None:
        """End the process groups at once (`Failure`)."""
        self._pending.drop()
        self.groups.abort()

    def sends(self, edge: Edge) -> bool:
        """Whether this rank gives rows to the edge."""
        return any(self.groups.rank in lane for lane in edge.senders)

    def receives(self, edge: Edge) -> bool:
        """Whether this rank takes rows from the edge."""
        return any(self.groups.rank in lane for lane in edge.receivers)

    def forget(self) -> None:
        """Microbatches whose gradients will not come: what ran forward only, with gradients enabled."""
        for crossed in self._crossed.values():
            crossed.clear()

    def close(self) -> None:
        """Wait for what was sent, and give the groups back. On every rank, in one order."""
        if not self.failure.failed:
            with self.failure.guarded(lambda: "waited for rows to leave"):
                self._pending.wait()
        self.groups.close()

    def run(
        self,
        outputs: Mapping[str, Tensor | None] | None = None,
        gradients: Mapping[str, Tensor | None] | None = None,
        *,
        forward: bool = False,
        backward: bool = False,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """One exchange. Every rank of the hub calls it with the same directions.

        Args:
            outputs: source module -> its tensor, of the modules that this rank sends from; None: no rows.
            gradients: source module -> gradient of what it sent, on a receiving rank; None: zero.
            forward, backward: which way rows go.

        Returns: source module -> received tensor, on a receiving rank; source module -> received gradient, on
            a sending one (None of a frozen source).

        Raises:
            BoundaryError: the same on every rank.
        """
        self.failure.check()
        ahead = self._forward(outputs or {}) if forward else []
        back = self._backward(gradients or {}) if backward else []
        # What this rank sends forward in training has arrived when its gradient comes back.
        later = torch.is_grad_enabled() and any(self.sends(e) and not e.frozen for e in self.edges)
        found = exchange(
            [leg for _, leg in (*ahead, *back)], self.groups, self.failure, self._pending if later else None
        )
        inputs: dict[str, Tensor] = {}
        returned: dict[str, Tensor | None] = {
            edge.source_name: None for edge in self.edges if backward and self.sends(edge)
        }
        for (edge, _), rows in zip(ahead, found, strict=False):
            if rows is not None:
                inputs[edge.source_name] = edge.from_rows(rows.detach()).requires_grad_()
        for (edge, _), rows in zip(back, found[len(ahead) :], strict=True):
            if rows is not None:
                returned[edge.source_name] = edge.from_rows(rows)
        return inputs, returned

    def _forward(self, outputs: Mapping[str, Tensor | None]) -> list[tuple[Edge, Leg]]:
        microbatch = self._next()
        rows = {edge: self._held(edge, outputs) for edge in self.edges if self.sends(edge)}
        counts: dict[Edge, tuple[int, ...]] = {}
        for edge in self.edges:
            if microbatch is not None and edge.ndim == 2 and edge.source_name in dict(microbatch.rows):
                counts[edge] = microbatch.rows_of(edge.source_name)
        strange = [edge for edge in self.edges if edge not in counts or edge not in self._agreed]
        answers = ask_forward(strange, rows, outputs, counts, microbatch, self.groups, self.failure)
        for edge, answer in answers.items():
            if answer.row is not None and answer.dtype is not None:
                self._agreed[edge] = Agreed(answer.row, answer.dtype)
            counts.setdefault(edge, answer.counts)
        self._exchanges["forward"] += 1
        legs = []
        for edge in self.edges:
            crossed = self._plan(edge, counts[edge], microbatch)
            if torch.is_grad_enabled() and not edge.frozen:
                self._crossed[edge].append(crossed)
            legs.append((edge, self._leg(edge, "forward", crossed, rows.get(edge))))
        return legs

    def _backward(self, gradients: Mapping[str, Tensor | None]) -> list[tuple[Edge, Leg]]:
        edges = [edge for edge in self.edges if not edge.frozen]
        rows: dict[Edge, Tensor | None] = {}
        for edge in edges:
            if self.receives(edge) and (gradient := gradients.get(edge.source_name)) is not None:
                rows[edge] = edge.to_rows(gradient)
        unknown = [edge for edge in edges if not self._crossed[edge]]
        for edge, answer in ask_backward(unknown, rows, self.groups, self.failure).items():
            if answer.row is not None and answer.dtype is not None:
                self._agreed.setdefault(edge, Agreed(answer.row, answer.dtype))
            self._crossed[edge].append(self._plan(edge, answer.counts, None))
        self._exchanges["backward"] += 1
        return [
            (edge, self._leg(edge, "backward", self._crossed[edge].popleft(), rows.get(edge)))
            for edge in edges
        ]

    def _next(self) -> Microbatch | None:
        stream = self.training if torch.is_grad_enabled() else self.evaluation
        try:
            return stream.next()
        except Exception as error:
            self.failure.fail(f"microbatch {stream.crossed - 1} has no description: {error!r}", error)

    def _held(self, edge: Edge, outputs: Mapping[str, Tensor | None]) -> Tensor | None:
        """What this rank sends, as rows."""
        if edge.source_name not in outputs:
            self.failure.fail(f"{edge.name}: no output of {edge.source_name} among {sorted(outputs)}")
        tensor = outputs[edge.source_name]
        if tensor is None:
            return None
        if tensor.ndim != edge.ndim:
            self.failure.fail(
                f"{edge.name}: a tensor of shape {tuple(tensor.shape)}, agreed are {edge.ndim} dimensions: "
                "set module_output_ndim of the module"
            )
        if edge.dtype is not None and tensor.dtype != edge.dtype:
            self.failure.fail(
                f"{edge.name}: rows are {tensor.dtype}, agreed is {edge.dtype}: set config.pipeline_dtype to "
                "the dtype of the encoders' output, or cast it"
            )
        if edge.frozen and tensor.requires_grad:
            self.failure.fail(
                f"{edge.name}: {edge.source_name} is frozen, but its output requires a gradient: take it out "
                "of frozen=, or run the module under torch.no_grad()"
            )
        return edge.to_rows(tensor)

    def _plan(self, edge: Edge, counts: tuple[int, ...], microbatch: Microbatch | None) -> _Crossed:
        agreed = self._agreed.get(edge)
        if agreed is None:  # nobody has ever had a row
            agreed = Agreed((edge.hidden or 0,) * (edge.ndim - 1), edge.dtype or torch.get_default_dtype())
        try:
            return _Crossed(edge.plans(counts, agreed.row_bytes, microbatch), agreed)
        except ValueError as error:
            self.failure.fail(f"{edge.name}: {error}", error)

    def _leg(self, edge: Edge, way: str, crossed: _Crossed, rows: Tensor | None) -> Leg:
        (plans, agreed), ahead = crossed, way == "forward"
        plan = plans.forward if ahead else plans.backward
        gives, takes = (self.sends(edge), self.receives(edge))[:: 1 if ahead else -1]
        if rows is None and gives:  # an absent output has no rows, an absent gradient is zero
            held = 0 if ahead else plan.rows_held(self.groups.rank)
            rows = torch.zeros(held, *agreed.row, dtype=agreed.dtype, device=self.groups.device)
        name = f"{edge.name}, {way} {self._exchanges[way]}"
        return Leg(plan, rows, takes, agreed.row, agreed.dtype, name)


def same_everywhere(said: Sequence[str], ranks: Sequence[int], failure: Failure) -> None:
    """Every rank was given the same edges.

    Raises:
        BoundaryError: the same on every rank.
    """
    for rank, theirs in zip(ranks, said, strict=True):
        if theirs != said[0]:
            failure.fail(
                f"ranks {ranks[0]} and {rank} connect modules differently: {said[0]} against {theirs}: "
                "construct communicators with the same arguments everywhere"
            )
