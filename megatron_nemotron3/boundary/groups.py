"""Process groups of a boundary communicator: created once, shared, and failing together.

`torch.distributed.new_group` is collective over the world, so every rank constructs every `Groups` in the
same order, including those it is not a member of. A group's memory and connections are released when its last
user closes it. Do not keep other references to a group: they would keep a failed rank's connections open and
its peers waiting.

When an exchange fails on one rank, it fails on all, with the same text, and no rank hangs. A rank that finds
an error writes the reason to the store of the default process group and aborts its boundary groups. The waits
of its peers then end with a communication error; they read the reason, fail and abort in turn. A rank that
died leaves no reason: those who notice write down what each was waiting for. The first reason written is the
one that all ranks raise.

On gloo a wait ends when the peer's connection closes. NCCL does not notice that a peer is gone: there the
watchdog of torch.distributed ends the process at the group's timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING), and
the reason is in the log of the rank that failed.
"""

from __future__ import annotations

import itertools
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist


class _Shared:
    """A process group with a reference count."""

    def __init__(self, group: Any) -> None:
        self.group = group  # None: closed, or this rank is not a member
        self.users = 0

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


#: Default group -> (ranks, backend, timeout) -> group. A new `init_process_group` starts with no groups.
_SHARED: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Shared]] = weakref.WeakKeyDictionary()


class Groups:
    """The process groups of one communicator.

    Args:
        ranks: all ranks that exchange rows.
        gathers: the ranks of each group that gathers rows (`Plan.gathers`), ascending as torch numbers them.
        backend: None: that of the default group.
        timeout: of every wait; None: that of the default group.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        gathers: Collection[Sequence[int]] = (),
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.ranks = tuple(sorted(set(ranks)))
        configuration = str(dist.get_backend_config() if backend is None else backend)
        on_cuda = "nccl" in configuration and torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        default: Any = dist.group.WORLD
        self.timeout = timeout or timedelta(
            seconds=default._get_backend(self.device).options._timeout.total_seconds()
        )
        for group in gathers:
            if list(group) != sorted(group):
                raise ValueError(f"ranks {group} of a group: give them in ascending order")
        others = {tuple(group) for group in gathers if len(group) > 1} - {self.ranks}
        self._mine = {group: self._get(group, backend) for group in (self.ranks, *sorted(others))}
        for group, shared in self._mine.items():
            if self.rank in group and shared.users == 1:
                # NCCL creates its communicator here, and gloo ensures that every member has connected.
                dist.all_reduce(torch.zeros(1, device=self.device), group=shared.group)

    def _get(self, ranks: tuple[int, ...], backend: str | None) -> _Shared:
        known = _SHARED.setdefault(dist.group.WORLD, {})
        key = (ranks, backend, self.timeout)
        shared = known.get(key)
        if shared is None or shared.users == 0:
            group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
            shared = known[key] = _Shared(group if self.rank in ranks else None)
        shared.users += 1
        return shared

    @property
    def is_member(self) -> bool:
        """Whether this rank exchanges rows."""
        return self.rank in self.ranks

    @property
    def group(self) -> Any:
        """The process group of all ranks. Do not keep a reference.

        Raises:
            RuntimeError: it is closed, or this rank is not a member.
        """
        return self.gather(self.ranks)

    def gather(self, ranks: Sequence[int]) -> Any:
        """The process group of these ranks. Do not keep a reference.

        Raises:
            RuntimeError: it is closed, or this rank is not a member.
        """
        shared = self._mine.get(tuple(ranks))
        if shared is None or shared.group is None:
            raise RuntimeError(
                f"no process group of ranks {list(ranks)} on rank {self.rank}: closed, or not made"
            )
        return shared.group

    def close(self) -> None:
        """Release the groups; unused ones are destroyed. Every rank closes in the same order."""
        for shared in self._mine.values():
            shared.users -= 1
            if shared.users == 0:
                shared.close()
        self._mine = {}

    def abort(self) -> None:
        """Destroy the groups at once, even if shared, so that waits of the peers end with an error."""
        for shared in self._mine.values():
            shared.close()


#: Seconds to collect what ranks were waiting for, if none has written a reason.
PATIENCE = 0.5
_numbers: dict[str, itertools.count[int]] = defaultdict(itertools.count)


class BoundaryError(RuntimeError):
    """An exchange between modules failed. Every rank of the communicator raises it with the same text."""


class Failure:
    """Makes all ranks of one communicator fail together.

    Every rank constructs it, in one order, because communicators of the same ranks are numbered.

    Args:
        ranks: ranks of the communicator.
        abort: destroys this rank's process groups (`Groups.abort`).
    """

    def __init__(self, ranks: Sequence[int], abort: Callable[[], None]) -> None:
        self.rank = dist.get_rank()
        self.ranks = tuple(ranks)
        self._abort = abort
        name = ",".join(map(str, ranks))
        self._key = f"megatron_nemotron3/boundary/{name}/{next(_numbers[name])}"
        self._reason: str | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank has raised the error."""
        return self._reason is not None

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
            self._reason = self._written_reason() or self._first_reason(self._collect_waits(doing(), error))
            self._abort()
            raise BoundaryError(self._reason) from error

    def _collect_waits(self, mine: str, error: Exception) -> str:
        """What all ranks were waiting for; ranks without an entry after PATIENCE seconds may be dead."""
        words = str(error).strip().splitlines()
        text = f"{mine} ({type(error).__name__}: {words[0][:160] if words else 'no message'})"
        try:
            store = _default_store()
            store.set(f"{self._key}/{self.rank}", mine)
            time.sleep(PATIENCE)
            others = [
                rank for rank in self.ranks if store.check([f"{self._key}/{rank}"]) and rank != self.rank
            ]
            heard = [f"rank {rank}: {store.get(f'{self._key}/{rank}').decode()}" for rank in others[:8]]
            silent = sorted(set(self.ranks) - {self.rank, *others})
        except RuntimeError:  # the process that hosts the store has ended
            heard, silent = [], []
        lines = [f"rank {self.rank}: {text}", *heard]
        if silent:
            lines.append(f"ranks {silent} say nothing: look for the first error in their logs")
        lines.append("cure: give both sides the same batches; if a rank died, its own log has the cause")
        return "\n".join(lines)

    def _written_reason(self) -> str | None:
        try:
            return _default_store().get(self._key).decode() if _default_store().check([self._key]) else None
        except RuntimeError:
            return None

    def _first_reason(self, reason: str) -> str:
        """Write the reason unless a rank has written one before; return the first."""
        try:
            return str(_default_store().compare_set(self._key, "", reason).decode())
        except RuntimeError:  # the process that hosts the store has ended
            return reason


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()
