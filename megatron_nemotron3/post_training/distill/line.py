"""Messages along a pipeline on a communicator of their own, so that none is taken for the student's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Tensors of a note, at most.
_MOST = 8


class Line:
    """The ranks of this rank's pipeline. Every rank of the world constructs it.

    Messages from one place to another arrive in the order in which they were sent.

    Args:
        pipeline: the process group of the stages; a rank's place is its index there.
    """

    def __init__(self, pipeline: Any) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(pipeline))
        self.place = self.ranks.index(dist.get_rank())
        self._group: Any = None
        self._sending: list[tuple[Any, Tensor]] = []
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.ranks)
        for line in sorted(set(every)):
            made = dist.new_group(list(line)) if len(line) > 1 else None
            self._group = made if line == self.ranks else self._group

    def send(self, tensor: Tensor, place: int) -> None:
        """Start to send to a place, which may be busy; what has been sent is released."""
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        kept = tensor.contiguous()
        self._sending.append((dist.isend(kept, dst=self.ranks[place], group=self._group), kept))

    def receive(self, into: Tensor, place: int) -> Tensor:
        """Wait for a message of the shape of `into` from a place."""
        dist.recv(into, src=self.ranks[place], group=self._group)
        return into

    def broadcast(self, note: Sequence[Tensor]) -> None:
        """Send int64 matrices from the first place to all others."""
        if len(self.ranks) == 1:
            return
        shapes = torch.zeros(_MOST, 2, dtype=torch.int64)
        shapes[: len(note)] = torch.tensor([one.shape for one in note])
        body = torch.cat([shapes.to(note[0].device).flatten(), *(one.flatten() for one in note)])
        for place in range(1, len(self.ranks)):
            self.send(body[: 2 * _MOST], place)
            self.send(body[2 * _MOST :], place)

    def receive_broadcast(self, device: torch.device) -> list[Tensor]:
        """Wait for a note of the first place; behind its matrices follow empty ones."""

        def next_one(size: int) -> Tensor:
            return self.receive(torch.empty(size, dtype=torch.int64, device=device), 0)

        shapes = next_one(2 * _MOST).view(-1, 2).tolist()
        sizes = [n * m for n, m in shapes]
        return [part.view(shape) for part, shape in zip(next_one(sum(sizes)).split(sizes), shapes)]
