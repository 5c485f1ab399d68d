"""All edges into one module: the plans that its ranks agree on, and the exchanges of a pipeline."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.agreement import SPLIT_SIZES, Announcement, RowsError, agree
from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.exchange import Pending, RankTransfer, RowKind, exchange, wait_for
from megatron_nemotron3.boundary.feed import FeedStream, Microbatch
from megatron_nemotron3.boundary.groups import Failure, Groups, by_value
from megatron_nemotron3.boundary.plan import TransferPlan

_numbers = itertools.count()


@dataclass(eq=False)
class Agreed:
    """Facts of a microbatch's rows of an edge, which all ranks have before they are sent.

    needs_gradient: whether the rows of any rank require a gradient, or of this rank if there was no header.
    tensor: what was sent or received; the schedule keeps it until backward. None: there was none.
    """

    edge: Edge
    plan: TransferPlan
    kind: RowKind
    needs_gradient: bool
    tensor: weakref.ref[Tensor] | None = None


class Coordinator:
    """The exchanges between the first stage of a module and the modules that feed it.

    Every rank of the world constructs it, in one order.

    edges: with the same destination, in the same order on every rank.
    failure: shared with other coordinators, whose owner compares edges (`require_same_edges`).
    timeout: None: that of the default group.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        *,
        failure: Failure | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.edges = tuple(edges)
        self.number = next(_numbers)
        ranks = sorted({rank for edge in edges for rank in edge.ranks})
        gathers = sorted({gather for edge in edges for gather in edge.gathers})
        self.groups = Groups(ranks, gathers, timeout=timeout)
        self._pending: Pending = []
        self.failure = failure or Failure(self.abort)
        self.training, self.evaluation = FeedStream(), FeedStream()
        self._kinds: dict[Edge, RowKind] = {}
        #: Microbatches whose gradients have not come back.
        self._outstanding: dict[Edge, deque[Agreed]] = {edge: deque() for edge in edges}
        #: Of the current exchange.
        self._newest: dict[Edge, Agreed] = {}
        #: Names of transfers, and the digests of all ranks as soon as the handle has completed.
        self._comparisons: deque[tuple[list[str], Any, Tensor]] = deque()
        self._forwards = self._backwards = 0
        if failure is None and self.groups.is_member:
            require_same_edges(self.edges, ranks, self.failure, self.groups)

    def abort(self) -> None:
        self._pending.clear()  # peers that wait for these sends fail
        self.groups.abort()

    def agree(self, offers: Sequence[Announcement], microbatch: Microbatch | None) -> list[Agreed]:
        """Agree on the plan of each offer; in a header, unless counts and shapes are known.

        Raises:
            RowsError: the headers do not fit together; on every rank.
        """
        known = dict(microbatch.rows) if microbatch is not None else {}
        counts: dict[Edge, tuple[int, ...]] = {}
        announced = []
        for offer in offers:
            edge = offer.edge
            if edge.ndim == 2 and edge.source_name in known:
                counts[edge] = known[edge.source_name]
                if edge not in self._kinds:
                    announced.append(offer._replace(described=(counts[edge], microbatch)))
                continue
            if edge.shared and microbatch is not None:
                raise ValueError(
                    f"the feed describes {sorted(known)}, but not {edge.source_name!r}: its `describe` must "
                    "include it"
                )
            if edge.shared and edge.source.sliced:
                raise RowsError(
                    f"rows of {edge.source_name} are split over TP={edge.source.tp} or CP={edge.source.cp}: "
                    "give the row counts (RowFeed)"
                )
            announced.append(offer)
        needs_gradient = {offer.edge: offer.needs_gradient for offer in offers}
        for edge, answer in agree(announced, self.groups, self.failure).items():
            if edge.ndim == 2 and answer.kind is not None and edge.hidden not in (None, *answer.kind.row):
                self.failure.fail(
                    f"{edge.name}: rows are {answer.kind.row[0]} wide, the language model takes "
                    f"{edge.hidden}: set the projector's output size to its hidden size"
                )
            if answer.kind is not None:
                self._kinds[edge] = RowKind(answer.kind.row, edge.dtype or answer.kind.dtype)
            counts.setdefault(edge, answer.counts)
            needs_gradient[edge] = answer.needs_gradient
        return [
            self._planned(edge, counts[edge], microbatch, needs_gradient[edge]) for edge in needs_gradient
        ]

    def _planned(
        self, edge: Edge, counts: tuple[int, ...], microbatch: Microbatch | None, needs_gradient: bool
    ) -> Agreed:
        kind = self._kinds.get(edge)
        if kind is None:  # no rank has had a row so far
            kind = RowKind((edge.hidden or 0,) * (edge.ndim - 1), edge.dtype or torch.get_default_dtype())
        try:
            return Agreed(edge, edge.plan(counts, kind.row_bytes, microbatch), kind, needs_gradient)
        except ValueError as error:
            self.failure.fail(f"{edge.name}: {error}", error)

    def sends(self, edge: Edge) -> bool:
        return any(self.groups.rank in lane for lane in edge.senders)

    def receives(self, edge: Edge) -> bool:
        return any(self.groups.rank in lane for lane in edge.receivers)

    def drop_forward_only(self) -> None:
        """Drop microbatches whose gradients will not come: those whose tensors the schedule has released.

        Gradients come in the order of the microbatches, so all before a dropped one are dropped, too.
        """
        for outstanding in self._outstanding.values():
            released = [i for i, o in enumerate(outstanding) if o.tensor is not None and o.tensor() is None]
            for _ in range(released[-1] + 1 if released else 0):
                outstanding.popleft()

    def close(self) -> None:
        """Wait for pending sends and release the groups. Call it on every rank, in one order."""
        try:
            if not self.failure.failed:
                with self.failure.guarded(lambda: "waited for rows to leave"):
                    wait_for(self._pending)
                self._compare(wait=True)
        finally:
            self._comparisons.clear()
            self.groups.close()

    def _compare(self, wait: bool = False) -> None:
        """Fail if ranks described earlier exchanges differently; `wait` for those that have not completed."""
        while self._comparisons:
            names, work, gathered = self._comparisons[0]
            if not wait and not work.is_completed():
                return
            self._comparisons.popleft()
            with self.failure.guarded(lambda names=names: f"compared {', '.join(names)}"):  # type: ignore[misc]
                work.wait()
            lines = []
            for name, digests in zip(names, gathered.T.tolist(), strict=True):
                sides = by_value(dict(zip(self.groups.ranks, digests, strict=True))).values()
                if len(sides) > 1:
                    text = " and ".join(f"rank {r[0]}" if len(r) == 1 else f"ranks {r}" for r in sides)
                    lines.append(f"{name}: {text} describe the rows of the microbatch differently")
            if lines:
                self.failure.fail(
                    f"{'; '.join(lines)}, so wrong rows may have arrived: give both sides the same "
                    "batches and resume from the last checkpoint"
                )

    def run(
        self,
        outputs: Mapping[str, Tensor | None] | None = None,
        gradients: Mapping[str, Tensor | None] | None = None,
        *,
        forward: bool = False,
        backward: bool = False,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """Run one exchange. Every rank of the coordinator calls it with the same directions.

        Args:
            outputs: source module -> its tensor, of the modules that this rank sends from; None: no rows.
            gradients: source module -> gradient of what it sent, on a receiving rank; None: zero.

        Returns: the rows that this rank receives, and the gradients of what it sent, by source module; the
            gradient of a frozen module is None.
        """
        self.failure.check()
        self._compare()
        self._newest = {}
        try:
            ahead = self._forward(outputs or {}) if forward else []
            back = self._backward(gradients or {}) if backward else []
        except RowsError as error:  # for middle stages, too, which had no header
            self.failure.fail(str(error), error)
        # What this rank sends forward in training has arrived when its gradient comes back.
        later = torch.is_grad_enabled() and any(self.sends(e) and not e.frozen for e in self.edges)
        transfers = [transfer for _, transfer in (*ahead, *back)]
        found = exchange(transfers, self.groups, self.failure, self._pending if later else None)
        if transfers and not self.groups.tagged:
            names = [transfer.name for transfer in transfers]
            comparison = self.groups.start_comparing([transfer.tag() for transfer in transfers])
            self._comparisons.append((names, *comparison))
        inputs: dict[str, Tensor] = {}
        returned: dict[str, Tensor | None] = {
            edge.source_name: None for edge in self.edges if backward and self.sends(edge)
        }
        for (edge, _), rows in zip(ahead, found, strict=False):
            tensor = (outputs or {}).get(edge.source_name)
            if rows is not None:
                tensor = inputs[edge.source_name] = edge.from_rows(rows.detach()).requires_grad_()
            if tensor is not None and edge in self._newest:
                self._newest[edge].tensor = weakref.ref(tensor)
        for (edge, _), rows in zip(back, found[len(ahead) :], strict=True):
            if rows is not None:
                returned[edge.source_name] = edge.from_rows(rows)
        return inputs, returned

    def _forward(self, outputs: Mapping[str, Tensor | None]) -> list[tuple[Edge, RankTransfer]]:
        microbatch = self._next_microbatch()
        offers = [Announcement(edge, *self._rows_to_send(edge, outputs)) for edge in self.edges]
        self._forwards += 1
        transfers = []
        for offer, agreed in zip(offers, self.agree(offers, microbatch), strict=True):
            edge, rows, kind = offer.edge, offer.rows, agreed.kind
            if torch.is_grad_enabled() and not edge.frozen:
                self._newest[edge] = agreed
                self._outstanding[edge].append(agreed)
            if rows is None and self.sends(edge):  # an absent output has no rows
                rows = torch.zeros(0, *kind.row, dtype=kind.dtype, device=self.groups.device)
            name = f"{edge.name}, forward {self._forwards}"
            transfers.append((edge, RankTransfer(agreed.plan, rows, self.receives(edge), kind, name)))
        return transfers

    def _rows_to_send(
        self, edge: Edge, outputs: Mapping[str, Tensor | None]
    ) -> tuple[Tensor | None, Sequence[int] | None]:
        """The rows, and the number of each sample's, if known."""
        if not self.sends(edge):
            return None, None
        if edge.source_name not in outputs:
            self.failure.fail(f"{edge.name}: no output of {edge.source_name} among {sorted(outputs)}")
        tensor = outputs[edge.source_name]
        if tensor is None:
            return None, None
        if tensor.ndim != edge.ndim:
            self.failure.fail(
                f"{edge.name}: a tensor of shape {tuple(tensor.shape)}, agreed are {edge.ndim} dimensions: "
                "set module_output_ndim of the module"
            )
        return edge.to_rows(tensor.detach()), getattr(tensor, SPLIT_SIZES, None)

    def _backward(self, gradients: Mapping[str, Tensor | None]) -> list[tuple[Edge, RankTransfer]]:
        edges = [edge for edge in self.edges if not edge.frozen]
        rows: dict[Edge, Tensor | None] = {}
        for edge in edges:
            if self.receives(edge) and (gradient := gradients.get(edge.source_name)) is not None:
                rows[edge] = edge.to_rows(gradient.detach())
        alone = [edge for edge in edges if not self._outstanding[edge]]  # their rows were never exchanged
        for edge in alone:
            if edge.destination.sliced:
                self.failure.fail(f"{edge.name}: a gradient without a forward exchange: send the rows first")
        offers = [Announcement(edge, rows.get(edge), backward=True) for edge in alone]
        for edge, agreed in zip(alone, self.agree(offers, None), strict=True):
            self._outstanding[edge].append(agreed)
        self._backwards += 1
        transfers = []
        for edge in edges:
            oldest = self._outstanding[edge].popleft()
            plan, kind, tensor = oldest.plan.backward, oldest.kind, rows.get(edge)
            if tensor is None and self.receives(edge):  # an absent gradient is zero
                held = plan.rows_held(self.groups.rank)
                tensor = torch.zeros(held, *kind.row, dtype=kind.dtype, device=self.groups.device)
            name = f"{edge.name}, backward {self._backwards}"
            transfers.append((edge, RankTransfer(plan, tensor, self.sends(edge), kind, name)))
        return transfers

    def _next_microbatch(self) -> Microbatch | None:
        stream = self.training if torch.is_grad_enabled() else self.evaluation
        try:
            return stream.next()
        except Exception as error:
            self.failure.fail(f"microbatch {stream.exchanged - 1} has no description: {error!r}", error)


def require_same_edges(
    edges: Sequence[Edge], ranks: Sequence[int], failure: Failure, groups: Groups | None = None
) -> None:
    """Check that every rank was given the same edges; without `groups` in the default group."""
    found: list[str] = [""] * len(ranks)
    with failure.guarded(lambda: f"waited for the edges of ranks {list(ranks)}"):
        # No local variable holds the process group: it would keep a failed rank's connections open.
        dist.all_gather_object(found, repr(edges), group=groups.group if groups else None)
    for rank, theirs in zip(ranks, found, strict=True):
        if theirs != found[0]:
            failure.fail(
                f"ranks {ranks[0]} and {rank} connect modules differently: {found[0]} against {theirs}: "
                "construct communicators with the same arguments everywhere"
            )
