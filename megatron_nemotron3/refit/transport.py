"""How the bytes of a step travel: as messages of the process group, or through shared memory on one host.

In shared memory a sender packs into a file of two halves, and its receivers read from there: one half is read
while the other is filled. The process group carries only where a message lies, and that it has been read. So
a peer that ends is noticed as on the other way. The file is anonymous (memfd): it has no name in any folder,
no limit of /dev/shm applies, and the kernel frees it when the last process that maps it has ended, however it
ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.groups import Groups


def post(groups: Groups, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Any]:
    """Start to send to and receive from ranks; returns the handles."""
    group = groups.group
    operations = [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in sorted(sent.items())]
    operations += [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in sorted(received.items())]
    return dist.batch_isend_irecv(operations) if operations else []


def wait(handles: list[Any]) -> None:
    """Wait for what `post` started."""
    for handle in handles:
        handle.wait()


class Messages:
    """Buffers of this process, which the process group sends."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._handles: list[Any] = []
        self._received: dict[int, Tensor] = {}
        self._own: dict[int, Tensor] = {}

    def outgoing(self, number: int, sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Buffers for messages. number: of the step, among those of this rank. sizes: bytes by receiver."""
        return {peer: self._empty(size) for peer, size in sizes.items()}

    def start(self, sent: Mapping[int, Tensor], sizes: Mapping[int, int]) -> None:
        """Send what was packed into buffers, and expect messages. sizes: bytes by sender.

        A message to this rank itself stays where it is.
        """
        self._own, others = self._divided(sent)
        self._received = {peer: self._empty(size) for peer, size in self._divided(sizes)[1].items()}
        self._handles = post(self._groups, others, self._received)

    def finish(self) -> dict[int, Tensor]:
        """Wait for the messages; returns them by sender."""
        wait(self._handles)
        return self._received | self._own

    def _divided(self, by_rank: Mapping[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        own = {rank: value for rank, value in by_rank.items() if rank == self._groups.rank}
        return own, {rank: value for rank, value in by_rank.items() if rank not in own}

    def release(self) -> None:
        """Say that the messages have been read."""

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._groups.device)


class SharedMemory(Messages):
    """Buffers in the memory of the senders, which the receivers map.

    Args:
        size: the most bytes that this rank sends in a step; 0 if it only receives.
    """

    def __init__(self, groups: Groups, size: int) -> None:
        super().__init__(groups)
        self._half = size
        self._file = os.memfd_create("nemotron3-refit") if size else None
        if self._file is not None:
            os.posix_fallocate(self._file, 0, 2 * size)
            self._memory = torch.frombuffer(mmap.mmap(self._file, 2 * size), dtype=torch.uint8)
        self._peers: dict[int, Tensor] = {}

    def address(self) -> tuple[str, int, int | None, int]:
        """What `connect` needs on the other ranks: host and container, process, file, bytes."""
        return _host(), os.getpid(), self._file, 2 * self._half

    def connect(self, addresses: Mapping[int, tuple[str, int, int, int]]) -> None:
        """Map the files of the senders.

        Raises:
            OSError: a process is on another host or in another container, or its file cannot be opened.
        """
        for peer, (host, process, file, size) in addresses.items():
            if host != _host():
                raise OSError(f"rank {peer} is on another host or in another container: leave shared out")
            opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._peers[peer] = torch.frombuffer(mmap.mmap(opened, size), dtype=torch.uint8)
            finally:
                os.close(opened)

    def close_file(self) -> None:
        """Close the file, once all receivers have mapped it: only the mappings keep the memory."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def outgoing(self, number: int, sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Buffers in the half of the file that nobody reads."""
        buffers, at = {}, number % 2 * self._half
        for peer, size in sizes.items():
            if peer == self._groups.rank:
                buffers[peer] = self._empty(size)
                continue
            buffers[peer] = self._memory[at : at + size]
            at += size
        return buffers

    def start(self, sent: Mapping[int, Tensor], sizes: Mapping[int, int]) -> None:
        """Tell the receivers where their messages are."""
        self._own, others = self._divided(sent)
        self._sizes, self._readers = self._divided(sizes)[1], list(others)
        places = {peer: self._number(buffer.storage_offset()) for peer, buffer in others.items()}
        self._received = {peer: self._number(0) for peer in self._sizes}
        self._handles = post(self._groups, places, self._received)

    def finish(self) -> dict[int, Tensor]:
        """The messages, in the memory of the senders: valid until `release`."""
        wait(self._handles)
        places = {peer: int(place) for peer, place in self._received.items()}
        return self._own | {
            peer: self._peers[peer][place : place + self._sizes[peer]] for peer, place in places.items()
        }

    def release(self) -> None:
        """Tell the senders that their messages have been read, and wait until this rank's have been."""
        read = {peer: self._number(1) for peer in self._sizes}
        wait(post(self._groups, read, {peer: self._number(0) for peer in self._readers}))

    def _number(self, value: int) -> Tensor:
        return torch.tensor([value], device=self._groups.device)


def _host() -> str:
    """The running kernel and the namespace of process numbers, in which /proc shows other ranks."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return boot.read().strip() + os.readlink("/proc/self/ns/pid")


def available() -> int:
    """Bytes of memory that this host can still give. The limit of a container is not in it."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
