"""Counts the communication of this process at the calls of torch.distributed. For benchmarks and tests.

It counts point-to-point messages, broadcasts and all-gathers. Bytes are those that must enter or leave the
rank: a broadcast enters every rank but the source and leaves the source once; in an all-gather the parts of
the other ranks enter and the own part leaves once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Wire:
    """Counts of one process.

    sent, received: bytes of point-to-point messages with rows, by peer.
    shared: bytes that entered in collectives with rows.
    messages: point-to-point messages with rows that were sent.
    collectives: collectives with rows.
    control: messages and collectives of integers, which are shapes and headers.
    host_waits: reads of a tensor's value by the host (`.item()`, `.tolist()`).
    """

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    shared: int = 0
    messages: int = 0
    collectives: int = 0
    control: int = 0
    host_waits: int = 0

    def message(self, tensor: torch.Tensor, peer: int, sends: bool) -> None:
        """Count one end of a point-to-point message."""
        if tensor.dtype == torch.int64:
            self.control += sends
            return
        into = self.sent if sends else self.received
        into[peer] = into.get(peer, 0) + tensor.numel() * tensor.itemsize
        self.messages += sends

    def collective(self, tensor: torch.Tensor, entering: int) -> None:
        """Count a collective in which `entering` elements come from other ranks."""
        if tensor.dtype == torch.int64:
            self.control += 1
            return
        self.shared += entering * tensor.itemsize
        self.collectives += 1

    @property
    def crossing(self) -> tuple[int, int]:
        """Bytes sent and received in messages."""
        return sum(self.sent.values()), sum(self.received.values())


@contextmanager
def counted() -> Iterator[Wire]:
    """Count the communication of the block."""
    wire = Wire()
    functions = {
        (dist, "batch_isend_irecv"): _batch,
        (dist, "send"): lambda w, tensor, dst=None, group=None, tag=0, **_: w.message(tensor, dst, True),
        (dist, "recv"): lambda w, tensor, src=None, group=None, tag=0, **_: w.message(tensor, src, False),
        (dist, "broadcast"): _broadcast,
        (dist, "all_gather_into_tensor"): _all_gather,
        (torch.Tensor, "item"): _host,
        (torch.Tensor, "tolist"): _host,
        (torch.Tensor, "__bool__"): _host,
        (torch.Tensor, "__int__"): _host,
    }
    originals = {at: getattr(*at) for at in functions}

    def wrapped(at: tuple[Any, str], count: Any) -> Any:
        original = originals[at]

        def call(*args: Any, **kwargs: Any) -> Any:
            count(wire, *args, **kwargs)
            return original(*args, **kwargs)

        return call

    for at, count in functions.items():
        setattr(*at, wrapped(at, count))
    try:
        yield wire
    finally:
        for at, original in originals.items():
            setattr(*at, original)


def _batch(wire: Wire, operations: list[Any]) -> None:
    for operation in operations:
        wire.message(operation.tensor, operation.peer, operation.op is dist.isend)


def _broadcast(wire: Wire, tensor: torch.Tensor, src: int = 0, group: Any = None, **_: Any) -> None:
    wire.collective(tensor, 0 if dist.get_rank() == src else tensor.numel())


def _all_gather(wire: Wire, output: torch.Tensor, part: torch.Tensor, group: Any = None, **_: Any) -> None:
    wire.collective(output, output.numel() - part.numel())


def _host(wire: Wire, *_: Any, **__: Any) -> None:
    wire.host_waits += 1
