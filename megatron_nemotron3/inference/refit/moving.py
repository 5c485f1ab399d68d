"""The steps of one refit: pack, send, unpack; the next step is packed while one is sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.inference.refit.parts import Part, name_of, pack, parts_of, space_of, unpack
from megatron_nemotron3.inference.refit.plan import TensorTransfer


@dataclass(frozen=True)
class Route:
    """What this rank sends and receives.

    outgoing, incoming: transfers with the global rank of the other side. guarded: turns an error inside it,
    which its text describes, into one of all ranks.
    """

    outgoing: list[tuple[TensorTransfer, int]]
    incoming: list[tuple[TensorTransfer, int]]
    groups: Groups
    guarded: Callable[[str], AbstractContextManager[None]]
    steps: int


@dataclass
class RefitRun:
    """A refit that runs.

    sums: checksum of each part that this rank sends. known: the same by what the next refit compares.
    skipped: names that are not sent. sent, received: bytes of this rank.
    """

    route: Route
    source: Mapping[str, Tensor]
    sums: dict[Part, int]
    known: dict[Any, int]
    unchanged: tuple[str, ...] | None
    skipped: frozenset[str]
    sent: int = 0
    received: int = 0

    def steps(self, target: Any) -> Iterator[list[Part]]:
        """Move step by step; yield the parts that have arrived after each."""
        route, own = self.route, dist.get_rank()
        outgoing, coming = self._messages(route.outgoing), self._messages(route.incoming)
        numbers = sorted({*outgoing, *coming})
        packed: dict[int, Tensor] = {}
        for i, step in enumerate(numbers):
            incoming = coming[step]
            sizes = {peer: space_of(parts) for peer, parts in incoming.items()}
            with route.guarded(f"moved step {step} of {route.steps}"):
                packed = packed if i else self._pack(outgoing[step])
                received = {peer: self._empty(size) for peer, size in sizes.items() if peer != own}
                handles = self._post({peer: one for peer, one in packed.items() if peer != own}, received)
                following = self._pack(outgoing[numbers[i + 1]]) if i + 1 < len(numbers) else {}
                for handle in handles:
                    handle.wait()
                for peer, parts in incoming.items():
                    unpack(packed[own] if peer == own else received[peer], parts, target)
            self.sent += sum(len(one) for peer, one in packed.items() if peer != own)
            self.received += sum(size for peer, size in sizes.items() if peer != own)
            packed = following
            yield [part for parts in incoming.values() for part in parts]

    def _pack(self, messages: Mapping[int, list[Part]]) -> dict[int, Tensor]:
        source = LazyTensors(self.source.__getitem__)  # a packed tensor is made once in a step
        packed = {peer: self._empty(space_of(parts)) for peer, parts in messages.items()}
        for peer, parts in messages.items():
            pack(packed[peer], parts, source)
        return packed

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.route.groups.device)

    def _post(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Any]:
        group = self.route.groups.group
        operations = [dist.P2POp(dist.isend, one, peer, group) for peer, one in sorted(sent.items())]
        operations += [dist.P2POp(dist.irecv, one, peer, group) for peer, one in sorted(received.items())]
        return dist.batch_isend_irecv(operations) if operations else []

    def _messages(self, pairs: list[tuple[TensorTransfer, int]]) -> defaultdict[int, dict[int, list[Part]]]:
        """The parts of every message: step -> the other rank -> parts."""
        found: defaultdict[int, dict[int, list[Part]]] = defaultdict(dict)
        for transfer, peer in pairs:
            if parts := [part for part in parts_of(transfer) if name_of(part) not in self.skipped]:
                found[transfer.step].setdefault(peer, []).extend(parts)
        return found


class LazyTensors(dict[str, Tensor]):
    """Tensors, each made when it is first looked up."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Tensor:
        self[name] = self._make(name)
        return self[name]
