"""Carry out a plan over torch.distributed, and prove the result: a checksum of every tensor on both sides.

Each step is one message for each pair of ranks, and a sender packs the next step while one is sent. At the
end a server computes the checksum of what its parameters now hold, and compares it with what the senders
computed on theirs. Any error, a killed process too, becomes a RefitError on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.groups import BoundaryError, Failure, Groups
from megatron_nemotron3.inference.refit import replicas
from megatron_nemotron3.inference.refit.packer import PackedSource
from megatron_nemotron3.inference.refit.parts import (
    LazyTensors,
    Part,
    added,
    check_source,
    check_target,
    name_of,
    pack,
    parts_of,
    serving_parameters,
    space_of,
    sum_held,
    sum_sent,
    target_of,
    unpack,
)
from megatron_nemotron3.inference.refit.plan import RefitPlan, TensorTransfer

_CURE = (
    "cure: the log of the rank that failed or ended first has the reason; the servers' weights are not to be "
    "used"
)
#: Layers' and experts' numbers in a name.
_LAYER = re.compile(r".*layers\.\d+\.|^backbone\.|(?<=experts\.)\d+\.")


class RefitError(RuntimeError):
    """A refit failed, on every rank. Servers may hold some new and some old weights."""


@dataclass(frozen=True)
class RefitReport:
    """What a refit did.

    sent, received: bytes of this rank. tensors: number in the plan. unchanged: names of those that are the
    same bits as in the refit before, the same on all ranks; None in the first.
    """

    sent: int
    received: int
    tensors: int
    unchanged: tuple[str, ...] | None


@dataclass
class RefitRun:
    """A refit that runs.

    sums: checksum of each part that this rank sends. known: the same by what the next refit compares.
    skipped: names that are not sent. sent, received: bytes of this rank.
    """

    source: Mapping[str, Tensor]
    sums: dict[Part, int]
    known: dict[Any, int]
    unchanged: tuple[str, ...] | None
    skipped: frozenset[str]
    sent: int = 0
    received: int = 0


class Refit:
    """The groups of one refit, and the checksums of the last one. Every rank of the world constructs it.

    Args:
        senders, receivers: global rank of each training and serving rank; default: trainers from 0 on, and
            servers after them, or on the same ranks if the plan is colocated.
        backend, timeout: of the process group and of every wait; None: those of the default group.

    Raises:
        ValueError: other numbers of ranks than the plan's, or ranks that it cannot have.
        RefitError: ranks have different plans.
    """

    def __init__(
        self,
        plan: RefitPlan,
        *,
        senders: Sequence[int] | None = None,
        receivers: Sequence[int] | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        size, serving = plan.training.layout.world_size, plan.serving.size
        self.plan = plan
        self.senders = list(range(size)) if senders is None else list(senders)
        first = 0 if plan.colocated else size
        self.receivers = list(range(first, first + serving)) if receivers is None else list(receivers)
        if (len(self.senders), len(self.receivers)) != (size, serving):
            raise ValueError(
                f"{len(self.senders)} senders and {len(self.receivers)} receivers given, the plan has "
                f"{size} and {serving}"
            )
        for side, listed in (("senders", self.senders), ("receivers", self.receivers)):
            if len(set(listed)) < len(listed) or min(listed) < 0:
                raise ValueError(f"{side}={listed}: give each rank of the world once")
        if plan.colocated and any(a != b for a, b in zip(self.senders, self.receivers)):
            raise ValueError(
                f"the plan is colocated: sender {self.senders} and receiver {self.receivers} of the same "
                "number must be one rank"
            )
        ranks, world = sorted({*self.senders, *self.receivers}), dist.get_world_size()
        if ranks[-1] >= world:
            raise ValueError(f"the plan needs rank {ranks[-1]}, the world has {world} ranks")
        # Of its own, so that a refit that failed leaves others and the next one alone.
        self.groups = Groups(ranks, backend=backend, timeout=timeout, own=True)
        self._failure = Failure(self.groups.abort, cure=_CURE)
        rank = dist.get_rank()
        self.sender = self.senders.index(rank) if rank in self.senders else None
        self.receiver = self.receivers.index(rank) if rank in self.receivers else None
        #: What this rank sends and receives, with the other side's number, in the order of the steps.
        self._out = [] if self.sender is None else list(plan.outgoing(self.sender))
        self._in = [] if self.receiver is None else list(plan.incoming(self.receiver))
        self._last: dict[Any, int] = {}
        if self.groups.is_member:
            plans = self._gathered(plan.digest, "compared the plans")
            if other := [rank for rank, digest in plans.items() if digest != plans[ranks[0]]]:
                self._fail(f"the plan of ranks {other} is not that of rank {ranks[0]}")

    def run(
        self,
        source: Mapping[str, Tensor] | None = None,
        target: Mapping[str, Tensor] | None = None,
        *,
        delta: bool = False,
        check: bool = False,
    ) -> RefitReport:
        """Bring the weights to the servers.

        Args:
            source: on a trainer, its tensors (`held.training_tensors`).
            target: on a server, its parameters by the engine's names (`held.serving_parameters`).
            delta: send only tensors that changed since the last refit of this object; all are proved.
            check: move nothing, only prove what the servers hold, after `load_weights` of a stream.

        Raises:
            ValueError: this rank neither sends nor receives.
            RefitError: a rank lacks tensors or has unknown ones (before anything moves), a rank had another
                error or ended, or a tensor differs after the refit.
        """
        with self._shared_errors():
            sent = self._sent(source)
            problem = None
            if self.receiver is not None:
                problem = "none given" if target is None else check_target(self.plan, self.receiver, target)
            self._agree(problem, "target")
            run = self._start(sent, delta)
            for _ in () if check else self._steps(run, target or {}):
                pass
            found = {part: sum_held(part, (target or {})[target_of(part)]) for part in self._parts(self._in)}
            return self._prove(run, found)

    def stream(self, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor), as the engines' `load_weights` takes them.

        The plan's engine is "hf". All trainers and receivers iterate to the end; those without a replica
        yield nothing. A tensor is held from its first part until it was yielded.

        Raises:
            ValueError: the plan is for another engine, or as `run`.
            RefitError: as `run`; or a rank left its stream before the end.
        """
        if self.plan.serving.engine != "hf":
            raise ValueError(
                f"a stream has whole tensors, the plan is for {self.plan.serving}: use engine hf"
            )
        waiting: dict[str, list[Part]] = defaultdict(list)
        for part in self._parts(self._in):
            waiting[name_of(part)].append(part)
        left = {name: len(parts) for name, parts in waiting.items()}
        shapes, device = serving_parameters(self.plan, 0), self.groups.device
        made = LazyTensors(lambda name: torch.empty(shapes[name][0], dtype=shapes[name][1], device=device))
        found: dict[Part, int] = {}
        with self._shared_errors():
            run = self._start(self._sent(source), False)
            for parts in self._steps(run, made):
                for part in parts:
                    name = name_of(part)
                    left[name] -= 1
                    if left[name] == 0:
                        tensor = made.pop(name)
                        found |= {one: sum_held(one, tensor) for one in waiting.pop(name)}
                        yield name, tensor
            self._prove(run, found)

    def close(self) -> None:
        """Release the process groups. Every rank closes in the same order."""
        self.groups.close()

    def _sent(self, source: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """The tensors that this rank sends, after all ranks have agreed that they can."""
        problem = None
        if self.sender is not None:
            problem = "none given" if source is None else check_source(self.plan, self.sender, source)
        self._agree(problem, "source")
        self._compare_replicas(source or {})
        if not self.plan.serving.packed:
            return source or {}
        packed = PackedSource(self.plan, self.sender or 0, source or {}, self.groups.device)
        self._agree(packed.measure(), "source")
        with self._guarded("compared the largest magnitudes"):
            dist.all_reduce(packed.largest, dist.ReduceOp.MAX, group=self.groups.group)
            packed.search()
            dist.all_reduce(packed.errors, group=self.groups.group)
        self._agree(packed.compute_scales(), "source")
        return packed

    def _compare_replicas(self, source: Mapping[str, Tensor]) -> None:
        """Fail if two trainers hold other values of one weight: what is sent would depend on the sender."""
        names, sums = replicas.replica_sums(self.plan, self.sender, source)
        with self._guarded("compared the replicas of the trainers"):
            places = replicas.differing_places(sums.to(self.groups.device), self.groups.group)
        if places:
            self._fail(
                replicas.text(names, places, self._gathered(int(sums[places[0]]), "asked for one sum"))
            )

    def _agree(self, problem: str | None, what: str) -> None:
        """Fail on all ranks if one has a problem, before anything moves."""
        for rank, found in self._gathered(problem, "compared the tensors with the plan").items():
            if found is not None:
                self._fail(f"{what} of rank {rank}: {found}")

    def _gathered(self, value: Any, doing: str) -> dict[int, Any]:
        with self._guarded(doing):
            found: list[Any] = [None] * len(self.groups.ranks)
            dist.all_gather_object(found, value, group=self.groups.group)
        return dict(zip(self.groups.ranks, found, strict=True))

    def _start(self, source: Mapping[str, Tensor], delta: bool) -> RefitRun:
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
        changed[-1] = bool(known) and not self._last
        changed = changed.to(self.groups.device)
        with self._guarded("compared what has changed"):
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=self.groups.group)
        flags = changed.tolist()
        unchanged = (
            None if flags.pop() else tuple(n for n, flag in zip(index, flags, strict=True) if not flag)
        )
        self._last = {}  # until this refit has succeeded
        return RefitRun(source, sums, known, unchanged, frozenset((delta and unchanged) or ()))

    def _steps(self, run: RefitRun, target: Any) -> Iterator[list[Part]]:
        """Move step by step; yield the parts that have arrived after each."""
        own = dist.get_rank()
        outgoing = self._messages(self._out, self.receivers, run)
        coming = self._messages(self._in, self.senders, run)
        numbers = sorted({*outgoing, *coming})
        packed: dict[int, Tensor] = {}
        for i, step in enumerate(numbers):
            incoming = coming[step]
            sizes = {peer: space_of(parts) for peer, parts in incoming.items()}
            with self._guarded(f"moved step {step} of {self.plan.steps}"):
                packed = packed if i else self._pack(run.source, outgoing[step])
                received = {peer: self._empty(size) for peer, size in sizes.items() if peer != own}
                handles = self._post({peer: one for peer, one in packed.items() if peer != own}, received)
                following = self._pack(run.source, outgoing[numbers[i + 1]]) if i + 1 < len(numbers) else {}
                for handle in handles:
                    handle.wait()
                for peer, parts in incoming.items():
                    unpack(packed[own] if peer == own else received[peer], parts, target)
            run.sent += sum(len(one) for peer, one in packed.items() if peer != own)
            run.received += sum(size for peer, size in sizes.items() if peer != own)
            packed = following
            yield [part for parts in incoming.values() for part in parts]

    def _pack(self, source: Mapping[str, Tensor], messages: Mapping[int, list[Part]]) -> dict[int, Tensor]:
        once = LazyTensors(source.__getitem__)  # a packed tensor is made once in a step
        packed = {peer: self._empty(space_of(parts)) for peer, parts in messages.items()}
        for peer, parts in messages.items():
            pack(packed[peer], parts, once)
        return packed

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.groups.device)

    def _post(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Any]:
        group = self.groups.group
        operations = [dist.P2POp(dist.isend, one, peer, group) for peer, one in sorted(sent.items())]
        operations += [dist.P2POp(dist.irecv, one, peer, group) for peer, one in sorted(received.items())]
        return dist.batch_isend_irecv(operations) if operations else []

    @staticmethod
    def _messages(
        pairs: list[tuple[TensorTransfer, int]], ranks: Sequence[int], run: RefitRun
    ) -> defaultdict[int, dict[int, list[Part]]]:
        """The parts of every message: step -> global rank of the other side -> parts."""
        found: defaultdict[int, dict[int, list[Part]]] = defaultdict(dict)
        for transfer, number in pairs:
            if parts := [part for part in parts_of(transfer) if name_of(part) not in run.skipped]:
                found[transfer.step].setdefault(ranks[number], []).extend(parts)
        return found

    def _prove(self, run: RefitRun, found: Mapping[Part, int]) -> RefitReport:
        index = {name: i for i, name in enumerate(self.plan.names)}
        wrong = self._differences(run, found, len(index), lambda part, _: index[name_of(part)])
        if wrong:
            names = [self.plan.names[place] for place in wrong]
            servers = self._differences(
                run, found, len(self.receivers), lambda part, to: to if name_of(part) == names[0] else None
            )
            first = f"{names[0]} of rank {self.receivers[servers[0]]}"
            which = ", ".join(f"{n} {k}" for k, n in Counter(_LAYER.sub("", one) for one in names).items())
            self._fail(f"{len(wrong)} tensors differ from the trainer's, first {first}: {which}")
        self._last = run.known
        return RefitReport(run.sent, run.received, len(index), run.unchanged)

    def _differences(
        self,
        run: RefitRun,
        found: Mapping[Part, int],
        size: int,
        place: Callable[[Part, int | None], int | None],
    ) -> list[int]:
        """Places where what all ranks sent and what all hold have other checksums."""
        sums = [0] * size
        sent = ((p, to, run.sums[p]) for t, to in self._out for p in parts_of(t))
        held = ((p, self.receiver, -value) for p, value in found.items())
        for part, receiver, value in itertools.chain(sent, held):
            if (at := place(part, receiver)) is not None:
                sums[at] = added(sums[at], value * (2 * (receiver or 0) + 1))
        total = torch.tensor(sums, dtype=torch.int64).to(self.groups.device)
        with self._guarded("compared the checksums"):
            dist.all_reduce(total, group=self.groups.group)
        return total.nonzero()[:, 0].tolist()

    @contextlib.contextmanager
    def _shared_errors(self) -> Iterator[None]:
        """Turn any error of this rank into a RefitError, and end the waits of the others."""
        if not self.groups.is_member:
            raise ValueError(f"rank {self.groups.rank} neither sends nor receives in {self.plan.serving}")
        try:
            yield
        except RefitError:
            raise
        except GeneratorExit:
            with contextlib.suppress(RefitError):
                self._fail("it left the stream before the end")
            raise
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}", error)

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        try:
            with self._failure.guarded(lambda: f"waited while it {doing}"):
                yield
        except BoundaryError as error:
            raise RefitError(str(error)) from error

    def _fail(self, reason: str, cause: Exception | None = None) -> None:
        try:
            self._failure.fail(reason)
        except BoundaryError as error:
            raise RefitError(str(error)) from cause

    @staticmethod
    def _parts(pairs: list[tuple[TensorTransfer, int]]) -> list[Part]:
        return list(dict.fromkeys(part for transfer, _ in pairs for part in parts_of(transfer)))
