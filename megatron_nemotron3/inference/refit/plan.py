"""A refit as data: who sends which part of which tensor to whom, and in which step.

Every receiving rank gets every byte of its parameters once. In a step no rank sends or receives more than
`buffer` bytes, and a sender packs the next step while one is sent.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy

from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE
from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.shares import AxisCut

#: A part begins at a multiple of this many bytes of a message.
ALIGNMENT = 16


def aligned(size: int) -> int:
    """Bytes up to the next part of a message."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class TensorTransfer(NamedTuple):
    """A part of a tensor, or of the tensors of experts [first, last).

    name: Hugging Face's, with {e} for the expert. axis: of `cuts`, in the tensor of one expert. others:
    elements per index of the axis. target: name of the engine's parameter; its first axis is that of experts
    if `stacked`, where the first of these is at `place`. negated_exp: sent as -exp(tensor).
    receivers, senders: numpy int32, pair by pair.
    """

    name: str
    first: int
    last: int
    axis: int
    cuts: tuple[AxisCut, ...]
    others: int
    dtype: str
    target: str
    stacked: bool
    place: int
    negated_exp: bool
    receivers: bytes
    senders: bytes
    step: int = 0

    @property
    def piece(self) -> int:
        return sum(cut.stop - cut.start for cut in self.cuts) * self.others * ITEM_SIZE[self.dtype]

    @property
    def bytes(self) -> int:
        return self.piece * (self.last - self.first)

    @property
    def space(self) -> int:
        """Bytes in a message, where each expert's part is aligned."""
        return aligned(self.piece) * (self.last - self.first)

    @property
    def names(self) -> list[str]:
        return [self.name.replace("{e}", str(e)) for e in range(self.first, self.last)]

    @property
    def pairs(self) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
        return numpy.frombuffer(self.senders, "int32"), numpy.frombuffer(self.receivers, "int32")

    def between(self, colocated: bool) -> Any:
        """Which of the pairs are two processes."""
        senders, receivers = self.pairs
        return senders != receivers if colocated else numpy.ones(len(senders), bool)


class Load(NamedTuple):
    """Bytes of the busiest ranks.

    total: of all messages. messages: number of pairs of ranks with something to send, over all steps. sent,
    received: by the busiest rank. copied: bytes whose sender and receiver are one process. space: largest
    buffer of a step.
    """

    total: int
    messages: int
    sent: int
    received: int
    copied: int
    space: int


@dataclass(frozen=True)
class RefitPlan:
    """All transfers, in the order of their steps.

    colocated: sender r and receiver r are one process.
    """

    training: Training
    serving: EngineLayout
    buffer: int
    colocated: bool
    transfers: tuple[TensorTransfer, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal, the same on every machine."""
        found = hashlib.sha256(repr((self.training, self.serving, self.buffer, self.colocated)).encode())
        for transfer in self.transfers:
            found.update(repr(transfer).encode())
        return found.hexdigest()

    @property
    def steps(self) -> int:
        return 1 + self.transfers[-1].step if self.transfers else 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for transfer in self.transfers for name in transfer.names))

    def outgoing(self, rank: int) -> Iterator[tuple[TensorTransfer, int]]:
        """(transfer, receiver) of everything that a training rank sends, in order."""
        for transfer in self.transfers:
            senders, receivers = transfer.pairs
            yield from ((transfer, int(receiver)) for receiver in receivers[senders == rank])

    def incoming(self, rank: int) -> Iterator[tuple[TensorTransfer, int]]:
        """(transfer, sender) of everything that a serving rank receives, in order."""
        for transfer in self.transfers:
            senders, receivers = transfer.pairs
            yield from ((transfer, int(sender)) for sender in senders[receivers == rank])

    def load(self) -> Load:
        ranks = self.training.layout.world_size, self.serving.size
        sent, received = (numpy.zeros(n, "int64") for n in ranks)
        total = messages = copied = largest = 0
        for _, transfers in itertools.groupby(self.transfers, lambda transfer: transfer.step):
            space = [numpy.zeros(n, "int64") for n in ranks]
            pairs = []
            for transfer in transfers:
                senders, receivers = transfer.pairs
                other = transfer.between(self.colocated)
                copied += transfer.bytes * int((~other).sum())
                total += transfer.bytes * int(other.sum())
                for all_bytes, step_space, those in (
                    (sent, space[0], senders[other]),
                    (received, space[1], receivers[other]),
                ):
                    count = numpy.bincount(those, minlength=len(all_bytes))
                    all_bytes += count * transfer.bytes
                    step_space += count * transfer.space
                pairs.append(senders[other].astype("int64") * ranks[1] + receivers[other])
            messages += len(numpy.unique(numpy.concatenate(pairs)))
            largest = max(largest, *(int(one.max()) for one in space))
        return Load(total, messages, int(sent.max()), int(received.max()), copied, largest)
