"""Carry out a plan over torch.distributed, and prove the result: a checksum of every tensor on both sides.

    refit = Refit(plan)                                  # on every rank of the world
    refit.run(source=training_tensors(training, rank, model))          # on a trainer
    refit.run(target=parameters)                                       # on a server

Each step is one message for each pair of ranks, and a sender packs the next step while one travels. At the
end a server computes the checksum of what its parameters now hold, and compares it with what the senders
computed on theirs. Any error, a killed process too, becomes a RefitError on every rank.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.failure import BoundaryError, Failure
from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.refit.checksum import added
from megatron_nemotron3.refit.held import check_source, check_target, serving_parameters
from megatron_nemotron3.refit.packer import Packed
from megatron_nemotron3.refit.parts import (
    Part,
    by_step,
    name_of,
    pack,
    parts_of,
    space_of,
    sum_held,
    sum_sent,
    target_of,
    unpack,
)
from megatron_nemotron3.refit.plan import Plan, Transfer

_CURE = "cure: if a rank ended, its own log has the cause; the servers' weights are not to be used"


class RefitError(RuntimeError):
    """A refit failed. Every rank raises the same text. Servers may hold some new and some old weights."""


@dataclass(frozen=True)
class Report:
    """What a refit did.

    sent, received: bytes of this rank. tensors: number in the plan. unchanged: names of those that are the
    same bits as in the refit before, the same on all ranks; None in the first. checksums: of what this
    serving rank holds of each tensor, equal to the senders'.
    """

    sent: int
    received: int
    tensors: int
    unchanged: tuple[str, ...] | None
    checksums: Mapping[str, int] = field(default_factory=dict)


class Refit:
    """The groups of one refit, and what it remembers of the last one. Every rank of the world constructs it.

    Args:
        senders, receivers: global rank of each training and serving rank; default: trainers from 0 on, and
            servers behind them, or on the same ranks if the plan is colocated.
        backend, timeout: of the process group and of every wait; None: those of the default group.

    Raises:
        ValueError: other numbers of ranks than the plan's.
        RefitError: ranks have different plans.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        senders: Sequence[int] | None = None,
        receivers: Sequence[int] | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        size, serving = plan.training.layout.world_size, plan.serving.size
        self.plan = plan
        self.senders = list(range(size)) if senders is None else list(senders)
        behind = 0 if plan.colocated else size
        self.receivers = list(range(behind, behind + serving)) if receivers is None else list(receivers)
        if (len(self.senders), len(self.receivers)) != (size, serving):
            raise ValueError(
                f"{len(self.senders)} senders and {len(self.receivers)} receivers given, the plan has "
                f"{size} and {serving}"
            )
        ranks = sorted({*self.senders, *self.receivers})
        if ranks[-1] >= dist.get_world_size():
            raise ValueError(f"the plan needs rank {ranks[-1]}, the world has {dist.get_world_size()} ranks")
        self.groups = Groups(ranks, backend=backend, timeout=timeout)
        self._failure = Failure(ranks, self.groups.abort, cure=_CURE)
        rank = dist.get_rank()
        self.sender = self.senders.index(rank) if rank in self.senders else None
        self.receiver = self.receivers.index(rank) if rank in self.receivers else None
        self._out, self._in = by_step(plan, self.sender, True), by_step(plan, self.receiver, False)
        self._last: dict[Any, int] = {}
        if self.groups.is_member:
            with self._guarded("compared the plans"):
                found: list[Any] = [None] * len(ranks)
                dist.all_gather_object(found, plan.digest, group=self.groups.group)
            if other := [r for r, digest in zip(ranks, found, strict=True) if digest != found[0]]:
                self._fail(f"the plan of ranks {other} is not that of rank {ranks[0]}")

    def run(
        self,
        source: Mapping[str, Tensor] | None = None,
        target: Mapping[str, Tensor] | None = None,
        *,
        delta: bool = False,
    ) -> Report:
        """Bring the weights to the servers.

        Args:
            source: on a trainer, its tensors (`held.training_tensors`).
            target: on a server, its parameters by the engine's names (`held.serving_parameters`).
            delta: send only tensors that changed since the last refit of this object; all are proved.

        Raises:
            RefitError: a rank lacks tensors or has unknown ones (before anything moves), a rank ended, or a
                tensor differs after the refit.
        """
        sent = self._sent(source)
        problem = None
        if self.receiver is not None:
            problem = "none given" if target is None else check_target(self.plan, self.receiver, target)
        self._agree(problem, "target")
        moving = self._start(sent, delta)
        for _ in moving.steps(target or {}):
            pass
        found = {part: sum_held(part, (target or {})[target_of(part)]) for part in self._parts(self._in)}
        return self._prove(moving, found)

    def stream(self, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor), as the engines' `load_weights` takes them.

        The plan's engine is "hf". All trainers and receivers iterate to the end; those without a replica
        yield nothing. A tensor is held from its first part until it was yielded.

        Raises:
            ValueError: the plan is for another engine.
            RefitError: as `run`.
        """
        if self.plan.serving.engine != "hf":
            raise ValueError(
                f"a stream has whole tensors, the plan is for {self.plan.serving}: use engine hf"
            )
        moving = self._start(self._sent(source), False)
        waiting: dict[str, list[Part]] = defaultdict(list)
        for part in self._parts(self._in):
            waiting[name_of(part)].append(part)
        left = {name: len(parts) for name, parts in waiting.items()}
        made = _Made(self.plan, self.groups.device)
        found: dict[Part, int] = {}
        try:
            for parts in moving.steps(made):
                for part in parts:
                    name = name_of(part)
                    left[name] -= 1
                    if left[name] == 0:
                        tensor = made.pop(name)
                        found |= {one: sum_held(one, tensor) for one in waiting.pop(name)}
                        yield name, tensor
        except GeneratorExit:
            with contextlib.suppress(RefitError):
                self._fail("it left the stream before the end")
            raise
        self._prove(moving, found)

    def close(self) -> None:
        """Release the process groups. Every rank closes in the same order."""
        self.groups.close()

    def _sent(self, source: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """The tensors that this rank sends, after all ranks have agreed that they can."""
        packed = None
        if self.plan.serving.packed:
            packed = Packed(self.plan, self.sender or 0, source or {}, self.groups.device)
        problem = None
        if self.sender is not None:
            shapes = packed.shapes if packed else {n: t.shape for n, t in (source or {}).items()}
            problem = "none given" if source is None else check_source(self.plan, self.sender, shapes)
        self._agree(problem, "source")
        if packed is None:
            return source or {}
        self._agree(packed.measure(), "source")
        with self._guarded("compared the largest magnitudes"):
            dist.all_reduce(packed.largest, dist.ReduceOp.MAX, group=self.groups.group)
        self._agree(packed.settle(), "source")
        return packed

    def _agree(self, problem: str | None, what: str) -> None:
        """Fail on all ranks if one has a problem, before anything moves."""
        with self._guarded("compared the tensors with the plan"):
            found: list[Any] = [None] * len(self.groups.ranks)
            dist.all_gather_object(found, problem, group=self.groups.group)
        if first := next(((r, p) for r, p in zip(self.groups.ranks, found, strict=True) if p), None):
            self._fail(f"{what} of rank {first[0]}: {first[1]}")

    def _start(self, source: Mapping[str, Tensor], delta: bool) -> _Moving:
        """Compute the senders' checksums, and agree on what has changed."""
        sums: dict[Part, int] = {}
        known: dict[Any, int] = {}
        for part in self._parts(self._out):
            if (key := (name_of(part), part[0].target, part[0].cuts)) not in known:
                known[key] = sum_sent(part, source[name_of(part)])
            sums[part] = known[key]
        index = {name: i for i, name in enumerate(self.plan.names)}
        # Bit 0: changed. Bit 1: no earlier refit to compare with.
        changed = torch.zeros(len(index) + 1, dtype=torch.int32)
        for key, value in known.items():
            changed[index[key[0]]] |= self._last.get(key) != value
        changed[-1] = self.sender is not None and not self._last
        changed = changed.to(self.groups.device)
        with self._guarded("compared what has changed"):
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=self.groups.group)
        flags = changed.tolist()
        unchanged = (
            None if flags.pop() else tuple(n for n, flag in zip(index, flags, strict=True) if not flag)
        )
        self._last = {}  # until this refit has succeeded
        return _Moving(self, source, sums, known, unchanged, frozenset((delta and unchanged) or ()))

    def _prove(self, moving: _Moving, found: Mapping[Part, int]) -> Report:
        """Compare the senders' checksums with the receivers', tensor by tensor.

        Raises:
            RefitError: some differ. Every rank names the first.
        """
        expected = self._exchange_sums(moving.sums)
        sums: dict[str, list[int]] = {}
        for part, value in found.items():
            both = sums.setdefault(name_of(part), [0, 0])
            both[0], both[1] = added(both[0], value), added(both[1], expected[part])
        wrong = [name for name, (mine, theirs) in sums.items() if mine != theirs]
        with self._guarded("compared the checksums"):
            everyone: list[Any] = [None] * len(self.groups.ranks)
            dist.all_gather_object(everyone, wrong[:1] + [len(wrong)], group=self.groups.group)
        for rank, (*first, number) in zip(self.groups.ranks, everyone, strict=True):
            if number:
                self._fail(f"{number} tensors of rank {rank} differ from the trainer's, first {first[0]}")
        self._last = moving.known
        checksums = {name: mine for name, (mine, _) in sums.items()}
        tensors = len(self.plan.names)
        return Report(moving.sent, moving.received, tensors, moving.unchanged, checksums)

    def _exchange_sums(self, sums: Mapping[Part, int]) -> dict[Part, int]:
        device = self.groups.device
        mine: dict[int, list[int]] = defaultdict(list)
        theirs: dict[int, Tensor] = {}
        for transfer, receiver in self._all(self._out):
            mine[self.receivers[receiver]] += [sums[part] for part in parts_of(transfer)]
        order: dict[int, list[Part]] = defaultdict(list)
        for transfer, sender in self._all(self._in):
            order[self.senders[sender]] += parts_of(transfer)
        rank = dist.get_rank()
        theirs[rank] = torch.tensor(mine.pop(rank, []), dtype=torch.int64)
        buffers = {
            r: torch.empty(len(parts), dtype=torch.int64, device=device)
            for r, parts in order.items()
            if r != rank
        }
        sent = {r: torch.tensor(values, dtype=torch.int64, device=device) for r, values in mine.items()}
        with self._guarded("exchanged checksums"):
            self.wait(self.post(sent, buffers))
        found: dict[Part, int] = {}
        for peer, parts in order.items():
            values = (theirs[rank] if peer == rank else buffers[peer]).tolist()
            found |= dict(zip(parts, values, strict=True))
        return found

    def post(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Any]:
        """Start to send to and receive from ranks; returns the handles."""
        group = self.groups.group
        operations = [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in sorted(sent.items())]
        operations += [
            dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in sorted(received.items())
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    @staticmethod
    def wait(handles: list[Any]) -> None:
        """Wait for what `post` started."""
        for handle in handles:
            handle.wait()

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        try:
            with self._failure.guarded(lambda: f"waited while it {doing}"):
                yield
        except BoundaryError as error:
            raise RefitError(str(error)) from error

    def _fail(self, reason: str) -> None:
        try:
            self._failure.fail(reason)
        except BoundaryError as error:
            raise RefitError(str(error)) from None

    @staticmethod
    def _all(steps: Mapping[int, list[tuple[Transfer, int]]]) -> Iterator[tuple[Transfer, int]]:
        for step in sorted(steps):
            yield from steps[step]

    def _parts(self, steps: Mapping[int, list[tuple[Transfer, int]]]) -> list[Part]:
        return list(dict.fromkeys(part for transfer, _ in self._all(steps) for part in parts_of(transfer)))


class _Moving:
    """One refit under way. skipped: names that are not sent."""

    def __init__(
        self,
        refit: Refit,
        source: Mapping[str, Tensor],
        sums: dict[Part, int],
        known: dict[Any, int],
        unchanged: tuple[str, ...] | None,
        skipped: frozenset[str],
    ) -> None:
        self.refit, self.source, self.sums, self.known = refit, source, sums, known
        self.unchanged, self._skipped = unchanged, skipped
        self.sent = self.received = 0

    def steps(self, target: Any) -> Iterator[list[Part]]:
        """Move step by step; yield the parts that have arrived after each."""
        refit = self.refit
        numbers = sorted({*refit._out, *refit._in})
        packed = self._pack(numbers[0]) if numbers else {}
        for i, step in enumerate(numbers):
            incoming = self._lists(refit._in.get(step, []), refit.senders)
            buffers = {
                peer: torch.empty(space_of(parts), dtype=torch.uint8, device=refit.groups.device)
                for peer, parts in incoming.items()
                if peer != dist.get_rank()
            }
            self.sent += sum(map(len, packed.values())) - len(packed.get(dist.get_rank(), ()))
            self.received += sum(map(len, buffers.values()))
            buffers |= {peer: packed.pop(peer) for peer in list(packed) if peer == dist.get_rank()}
            others = {peer: buffer for peer, buffer in buffers.items() if peer != dist.get_rank()}
            with refit._guarded(f"moved step {step} of {refit.plan.steps}"):
                handles = refit.post(packed, others)
                following = self._pack(numbers[i + 1]) if i + 1 < len(numbers) else {}
                refit.wait(handles)
                for peer, parts in incoming.items():
                    unpack(buffers[peer], parts, target)
            packed = following
            yield [part for parts in incoming.values() for part in parts]

    def _pack(self, step: int) -> dict[int, Tensor]:
        refit, packed, source = self.refit, {}, _Once(self.source)
        for peer, parts in self._lists(refit._out.get(step, []), refit.receivers).items():
            packed[peer] = torch.empty(space_of(parts), dtype=torch.uint8, device=refit.groups.device)
            pack(packed[peer], parts, source)
        return packed

    def _lists(self, pairs: list[tuple[Transfer, int]], ranks: list[int]) -> dict[int, list[Part]]:
        found: dict[int, list[Part]] = {}
        for transfer, peer in pairs:
            if parts := [part for part in parts_of(transfer) if name_of(part) not in self._skipped]:
                found.setdefault(ranks[peer], []).extend(parts)
        return found


class _Once(dict[str, Tensor]):
    """Tensors of a source, each looked up once: a packed one is made then."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._source = source

    def __missing__(self, name: str) -> Tensor:
        self[name] = self._source[name]
        return self[name]


class _Made(dict[str, Tensor]):
    """Whole tensors, made when their first part arrives."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__()
        self._shapes, self._device = serving_parameters(plan, 0), device

    def __missing__(self, name: str) -> Tensor:
        shape, dtype = self._shapes[name]
        self[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return self[name]
