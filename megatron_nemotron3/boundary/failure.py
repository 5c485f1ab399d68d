"""One failure for all ranks of a communicator: all ranks raise an error that one of them found, in one text.

A rank that finds an error writes the reason where its peers can read it and aborts its boundary groups. The
waits of the peers then end with a communication error; they read the reason, fail and abort in turn. A rank
that died leaves no reason: those who notice compare what each was waiting for, and which processes still run.

Reasons are written to the store of the default process group, and to mailboxes: a small store on every rank.
So they can be read although the rank that hosts the default store, or the one that failed, has ended. A
mailbox that accepts a connection also shows that its process is alive.

On gloo a wait ends when the peer's connection closes. NCCL does not notice that a peer is gone: there the
watchdog of torch.distributed ends the process at the group's timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING), and
the reason is in the log of the rank that failed.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

#: Seconds to collect what ranks were waiting for, if none has written a reason.
PATIENCE = 0.5
#: Seconds to connect to a mailbox.
_CONNECT = 1.0
#: Number of mailboxes, of the lowest living ranks, in which ranks agree on one reason.
_KEEPERS = 3
CURE = "cure: give both sides the same batches; if a rank ended, its own log has the cause"
#: Number of transfers whose digests are kept; larger than any pipeline depth.
_REMEMBERED = 256
_numbers: dict[str, itertools.count[int]] = defaultdict(itertools.count)


class BoundaryError(RuntimeError):
    """An exchange between modules failed. Every rank of the communicator raises it with the same text."""


class Mailboxes:
    """A small store on every rank of the world. Every rank constructs it."""

    def __init__(self) -> None:
        self._own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._clients: dict[int, Any] = {dist.get_rank(): self._own}
        store, prefix = _default_store(), "megatron_nemotron3/boundary/mailbox"
        store.set(f"{prefix}/{dist.get_rank()}", json.dumps([_own_address(), self._own.port]))
        found = store.multi_get([f"{prefix}/{rank}" for rank in range(dist.get_world_size())])
        self._addresses = [tuple(json.loads(address)) for address in found]

    def alive(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks whose process accepts a connection."""
        if not ranks:
            return []
        with ThreadPoolExecutor(min(32, len(ranks))) as pool:
            return [
                rank for rank, answers in zip(ranks, pool.map(self._answers, ranks), strict=True) if answers
            ]

    def _answers(self, rank: int) -> bool:
        try:
            socket.create_connection(self._addresses[rank], timeout=_CONNECT).close()
        except OSError:
            return False
        return True

    def open(self, rank: int) -> Any:
        """The store of a rank.

        Raises:
            RuntimeError: its process has ended.
        """
        if rank not in self._clients:
            if not self._answers(rank):  # the store itself would retry for a long time
                raise RuntimeError(f"rank {rank} does not answer")
            host, port = self._addresses[rank]
            self._clients[rank] = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT)
            )
        return self._clients[rank]


#: Default group -> its mailboxes.
_MAILBOXES: weakref.WeakKeyDictionary[Any, Mailboxes] = weakref.WeakKeyDictionary()


def _mailboxes() -> Mailboxes:
    world: Any = dist.group.WORLD
    if world not in _MAILBOXES:
        _MAILBOXES[world] = Mailboxes()
    return _MAILBOXES[world]


def _own_address() -> str:
    """Address of this machine for the other ranks."""
    main = os.environ.get("MASTER_ADDR", "localhost")
    family, kind, _, _, address = socket.getaddrinfo(main, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing; it chooses the network interface
        own = str(probe.getsockname()[0])
    # The host of MASTER_ADDR may call itself 127.0.1.1; the others know it by that name.
    return main if own.startswith("127.") or own == "::1" else own


class Failure:
    """Makes all ranks of one communicator fail together.

    Every rank of the world constructs it, in one order, because communicators of the same ranks are numbered.

    Args:
        ranks: ranks of the communicator.
        abort: destroys this rank's process groups (`Groups.abort`).
        cure: last line of what is said where ranks do not know the reason.
    """

    def __init__(self, ranks: Iterable[int], abort: Callable[[], None], cure: str = CURE) -> None:
        self.rank = dist.get_rank()
        self.ranks = tuple(ranks)
        self._abort = abort
        self._cure = cure
        name = ",".join(map(str, self.ranks))
        self._key = f"megatron_nemotron3/boundary/{name}/{next(_numbers[name])}"
        self._reason: str | None = None
        self._mailboxes = _mailboxes()
        #: Name of a transfer -> digest of what this rank believes about it; the newest ones.
        self.beliefs: dict[str, int] = {}

    @property
    def failed(self) -> bool:
        """Whether this rank has raised the error."""
        return self._reason is not None

    def believe(self, digests: Mapping[str, int]) -> None:
        """Remember what this rank believes about transfers, to compare it with other ranks after a failure.

        Args:
            digests: name of each transfer -> digest of its plan; the same on all ranks if all is well.
        """
        self.beliefs |= digests
        while len(self.beliefs) > _REMEMBERED:
            del self.beliefs[next(iter(self.beliefs))]

    def check(self) -> None:
        """Raise the error again if this communicator has failed.

        Raises:
            BoundaryError: the communicator has failed.
        """
        if self._reason is not None:
            raise BoundaryError(self._reason)

    def fail(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Fail on all ranks, with this reason or with the one that another rank wrote before.

        Raises:
            BoundaryError: always.
        """
        self._reason = self._first_reason(f"rank {self.rank}: {reason}")
        self._abort()
        raise BoundaryError(self._reason) from cause

    def raise_written(self, error: BaseException) -> None:
        """Raise the reason that another rank wrote, if any, in place of an error that its end caused here.

        Raises:
            BoundaryError: a rank has failed before.
        """
        if (reason := self._written_reason()) is not None:
            traceback.clear_frames(error.__traceback__)
            self._reason = reason
            self._abort()
            raise BoundaryError(reason) from error

    @contextmanager
    def guarded(self, doing: Callable[[], str]) -> Iterator[None]:
        """Turn any error in the block into a BoundaryError on every rank.

        Args:
            doing: returns what this rank is waiting for, with numbers; called only if the block fails.

        Raises:
            BoundaryError: as `fail`.
        """
        self.check()
        try:
            yield
        except BoundaryError:
            raise
        except Exception as error:
            # The frames of the traceback hold process groups, whose connections keep the peers waiting.
            traceback.clear_frames(error.__traceback__)
            self._reason = self._written_reason() or self._diagnose(doing(), error)
            self._abort()
            raise BoundaryError(self._reason) from error

    def _diagnose(self, mine: str, error: Exception) -> str:
        """Compare what all ranks were waiting for; return the reason that all ranks raise."""
        words = str(error).strip().splitlines()
        text = f"{mine} ({type(error).__name__}: {words[0][:160] if words else 'no message'})"
        entry = [mine, self.beliefs]
        keepers = list(self._keepers())
        for store in keepers:
            _quietly(store.set, f"{self._key}/{self.rank}", json.dumps(entry))
        time.sleep(PATIENCE)
        if (written := self._written_reason()) is not None:
            return written
        entries: dict[int, Any] = {}
        for rank in self.ranks:
            key = f"{self._key}/{rank}"
            found = (_quietly(store.get, key) for store in keepers if _quietly(store.check, [key]))
            if (said := next((f for f in found if f is not None), None)) is not None:
                entries[rank] = json.loads(said)
        silent = [rank for rank in self.ranks if rank not in entries and rank != self.rank]
        running = self._mailboxes.alive(silent)
        lines = []
        if ended := sorted(set(silent) - set(running)):
            lines.append(f"{_ranks(ended)} ended: look for the first error in the log there")
        entries[self.rank] = entry
        lines += disagreements({rank: believed for rank, (_, believed) in sorted(entries.items())})
        if running and not lines:
            lines.append(f"{_ranks(running)} did not come to this exchange in time, but the process runs")
        lines.append(f"rank {self.rank}: {text}")
        lines += [f"rank {rank}: {entries[rank][0]}" for rank in sorted(entries) if rank != self.rank][:8]
        lines.append(self._cure)
        return self._first_reason("\n".join(lines))

    def _written_reason(self) -> str | None:
        """The reason that another rank wrote, if any."""
        for store in itertools.chain([self._mailboxes.open(self.rank)], self._keepers()):
            if _quietly(store.check, [self._key]) and (found := _quietly(store.get, self._key)) is not None:
                return str(found.decode())
        return None

    def _first_reason(self, reason: str) -> str:
        """Write the reason unless a rank has written one before; return the first."""
        first = reason
        for store in self._keepers():
            if (found := _quietly(store.compare_set, self._key, "", first)) is not None:
                first = found.decode()
        if first == reason:  # this rank was first: the others find it in their own mailbox
            for rank in self._mailboxes.alive([rank for rank in self.ranks if rank != self.rank]):
                if (store := _quietly(self._mailboxes.open, rank)) is not None:
                    _quietly(store.compare_set, self._key, "", first)
        return first

    def _keepers(self) -> Iterator[Any]:
        """The default store and the mailboxes of the lowest living ranks, in one order on all ranks."""
        yield _default_store()
        living = 0
        for rank in self.ranks:
            if living < _KEEPERS and (store := _quietly(self._mailboxes.open, rank)) is not None:
                living += 1
                yield store


def disagreements(beliefs: Mapping[int, Mapping[str, int]]) -> list[str]:
    """A line for each transfer that ranks describe differently.

    Args:
        beliefs: rank -> name of a transfer -> digest of what the rank believes about it.
    """
    lines = []
    for name in dict.fromkeys(name for believed in beliefs.values() for name in believed):
        groups = by_value({rank: believed[name] for rank, believed in beliefs.items() if name in believed})
        if len(groups) > 1:
            sides = " and ".join(_ranks(ranks) for ranks in groups.values())
            lines.append(f"{name}: {sides} describe the rows of the microbatch differently")
    return lines


def by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Value -> the ranks that have it."""
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call to a store; None if the process that hosts it has ended."""
    try:
        return call(*arguments)
    except (RuntimeError, OSError):
        return None


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()
