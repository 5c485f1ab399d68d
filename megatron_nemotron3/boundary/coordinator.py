"""All edges into one module: one exchange for each microbatch and direction, whichever modules send."""

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

from megatron_nemotron3.boundary.agreement import (
    SPLIT_SIZES,
    Announcement,
    HeaderAgreement,
    RowsError,
    agree,
    share_counts,
)
from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.exchange import Pending, RankTransfer, RowKind, exchange, wait_for
from megatron_nemotron3.boundary.feed import FeedStream, Microbatch
from megatron_nemotron3.boundary.groups import Failure, Groups, by_value
from megatron_nemotron3.boundary.plan import TransferPlan

_numbers = itertools.count()


@dataclass(eq=False)
class _Outstanding:
    """A microbatch whose gradients have not come back."""

    plan: TransferPlan
    kind: RowKind
    #: The tensor that was sent or received; the schedule keeps it until backward. None: there was none.
    tensor: weakref.ref[Tensor] | None = None


class Coordinator:
    """Exchanges rows between the first stage of a module and the modules that feed it.

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
        self._outstanding: dict[Edge, deque[_Outstanding]] = {edge: deque() for edge in edges}
        #: Of the current exchange.
        self._newest: dict[Edge, _Outstanding] = {}
        #: Names of transfers, and the digests of all ranks as soon as the handle has completed.
        self._comparisons: deque[tuple[list[str], Any, Tensor]] = deque()
        self._forwards = self._backwards = 0
        if failure is None and self.groups.is_member:
            require_same_edges(self.edges, ranks, self.failure, self.groups)

    def abort(self) -> None:
        self._pending.clear()  # peers that wait for these sends fail
        self.groups.abort()

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
        ahead = self._forward(outputs or {}) if forward else []
        back = self._backward(gradients or {}) if backward else []
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
        rows = {edge: self._rows_to_send(edge, outputs) for edge in self.edges if self.sends(edge)}
        counts: dict[Edge, tuple[int, ...]] = {}
        for edge in self.edges:
            if microbatch is not None and edge.ndim == 2 and edge.source_name in dict(microbatch.rows):
                counts[edge] = microbatch.rows_of(edge.source_name)
        announcements = {}
        for edge in self.edges:
            if edge not in counts or edge not in self._kinds:
                described = (counts[edge], microbatch) if edge in counts else None
                # With a feed, rows are checked against its counts later.
                sizes = None if described else getattr(outputs.get(edge.source_name), SPLIT_SIZES, None)
                shares = edge.shares // edge.source.dp
                announcements[edge] = Announcement(
                    edge.name,
                    edge.senders,
                    shares,
                    rows.get(edge),
                    self._share_counts(edge, rows.get(edge), shares, sizes, uneven=described is not None),
                    edge.source.sliced,
                    described,
                )
        for edge, answer in self._agree(announcements).items():
            if edge.ndim == 2 and answer.row is not None and edge.hidden not in (None, *answer.row):
                self.failure.fail(
                    f"{edge.name}: rows are {answer.row[0]} wide, the language model takes {edge.hidden}: "
                    "set the projector's output size to its hidden size"
                )
            if answer.row is not None and answer.dtype is not None:
                self._kinds[edge] = RowKind(answer.row, answer.dtype)
            counts.setdefault(edge, answer.counts)
        self._forwards += 1
        transfers = []
        for edge in self.edges:
            plan, kind = self._plan(edge, counts[edge], microbatch)
            if torch.is_grad_enabled() and not edge.frozen:
                self._newest[edge] = _Outstanding(plan, kind)
                self._outstanding[edge].append(self._newest[edge])
            tensor = rows.get(edge)
            if tensor is None and self.sends(edge):  # an absent output has no rows
                tensor = torch.zeros(0, *kind.row, dtype=kind.dtype, device=self.groups.device)
            name = f"{edge.name}, forward {self._forwards}"
            transfers.append((edge, RankTransfer(plan, tensor, self.receives(edge), kind, name)))
        return transfers

    def _backward(self, gradients: Mapping[str, Tensor | None]) -> list[tuple[Edge, RankTransfer]]:
        edges = [edge for edge in self.edges if not edge.frozen]
        rows: dict[Edge, Tensor | None] = {}
        for edge in edges:
            if self.receives(edge) and (gradient := gradients.get(edge.source_name)) is not None:
                rows[edge] = edge.to_rows(gradient)
        announcements = {}
        for edge in edges:
            if not self._outstanding[edge]:  # gradients of rows that were never exchanged
                if edge.destination.sliced:
                    self.failure.fail(
                        f"{edge.name}: a gradient without a forward exchange: send the rows first"
                    )
                shares, tensor = edge.shares // edge.destination.dp, rows.get(edge)
                counts = self._share_counts(edge, tensor, shares, None)
                announcements[edge] = Announcement(edge.name, edge.receivers, shares, tensor, counts)
        for edge, answer in self._agree(announcements).items():
            if answer.row is not None and answer.dtype is not None:
                self._kinds.setdefault(edge, RowKind(answer.row, answer.dtype))
            self._outstanding[edge].append(_Outstanding(*self._plan(edge, answer.counts, None)))
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

    def _share_counts(
        self,
        edge: Edge,
        rows: Tensor | None,
        shares: int,
        sizes: Sequence[int] | None,
        uneven: bool = False,
    ) -> tuple[int, ...] | None:
        """Rows of each share of the samples that this rank announces; None if it sends none."""
        if rows is None:
            return None
        uneven = uneven or edge.source.cp > 1 or edge.shares in (edge.source.dp, edge.destination.dp)
        try:
            return share_counts(rows.shape[0], shares, sizes, uneven)
        except ValueError as error:
            self.failure.fail(f"{edge.name}: {error}", error)

    def _agree(self, announcements: Mapping[Edge, Announcement]) -> dict[Edge, HeaderAgreement]:
        if not announcements:
            return {}
        try:
            found = agree(list(announcements.values()), self.groups, self.failure)
        except RowsError as error:
            self.failure.fail(str(error), error)
        return dict(zip(announcements, found, strict=True))

    def _next_microbatch(self) -> Microbatch | None:
        stream = self.training if torch.is_grad_enabled() else self.evaluation
        try:
            return stream.next()
        except Exception as error:
            self.failure.fail(f"microbatch {stream.exchanged - 1} has no description: {error!r}", error)

    def _rows_to_send(self, edge: Edge, outputs: Mapping[str, Tensor | None]) -> Tensor | None:
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
        return edge.to_rows(tensor)

    def _plan(
        self, edge: Edge, counts: tuple[int, ...], microbatch: Microbatch | None
    ) -> tuple[TransferPlan, RowKind]:
        kind = self._kinds.get(edge)
        if kind is None:  # no rank has had a row so far
            kind = RowKind((edge.hidden or 0,) * (edge.ndim - 1), edge.dtype or torch.get_default_dtype())
        try:
            return edge.plan(counts, kind.row_bytes, microbatch), kind
        except ValueError as error:
            self.failure.fail(f"{edge.name}: {error}", error)


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
