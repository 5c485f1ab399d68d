"""Process groups of a boundary communicator: made once, shared, ready before the first exchange.

`torch.distributed.new_group` concerns the whole world, so every rank constructs every `Groups`, in one order,
also those it is no member of. The groups' memory and connections end when the last user closes them: nobody
else may keep a reference to one, because that would keep a failed rank's connections open and its peers
waiting (`failure.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class _Shared:
    """A process group and the number of its users."""

    def __init__(self, group: Any) -> None:
        self.group = group  # None: closed, or this rank is no member
        self.users = 0

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


#: By default group: a new `init_process_group` starts with none. Then by ranks, backend and timeout.
_SHARED: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Shared]] = weakref.WeakKeyDictionary()


class Groups:
    """The groups of one communicator.

    Args:
        hub: all ranks between which rows cross; messages go through it.
        gathers: ranks that gather rows, for each group that does (`Plan.gathers`); ascending, because torch
            numbers them so.
        backend: None: that of the default group.
        timeout: of every wait; None: that of the default group.
    """

    def __init__(
        self,
        hub: Iterable[int],
        gathers: Collection[Sequence[int]] = (),
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.ranks = tuple(sorted(set(hub)))
        configuration = str(dist.get_backend_config() if backend is None else backend)
        on_cuda = "nccl" in configuration and torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        self.timeout = timeout or default_timeout(self.device)
        for ranks in gathers:
            if list(ranks) != sorted(ranks):
                raise ValueError(f"ranks {ranks} of a group: give them in ascending order")
        wanted = [self.ranks, *sorted({tuple(ranks) for ranks in gathers if len(ranks) > 1} - {self.ranks})]
        self._mine = {ranks: self._get(ranks, backend) for ranks in wanted}
        for ranks, shared in self._mine.items():
            if self.rank in ranks and shared.users == 1:
                # NCCL makes its communicator, and gloo is sure that every member has connected.
                dist.all_reduce(torch.zeros(1, device=self.device), group=shared.group)

    def _get(self, ranks: tuple[int, ...], backend: str | None) -> _Shared:
        known = _SHARED.setdefault(dist.group.WORLD, {})
        key = (ranks, backend, self.timeout)
        shared = known.get(key)
        if shared is None or (shared.users == 0):
            group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
            shared = known[key] = _Shared(group if self.rank in ranks else None)
        shared.users += 1
        return shared

    @property
    def is_member(self) -> bool:
        """Whether this rank exchanges rows."""
        return self.rank in self.ranks

    @property
    def hub(self) -> Any:
        """The group for messages. Do not keep it.

        Raises:
            RuntimeError: closed, or this rank is no member.
        """
        return self.gather(self.ranks)

    def gather(self, ranks: Sequence[int]) -> Any:
        """The group of these ranks. Do not keep it.

        Raises:
            RuntimeError: closed, or this rank is no member.
        """
        shared = self._mine.get(tuple(ranks))
        if shared is None or shared.group is None:
            raise RuntimeError(
                f"no process group of ranks {list(ranks)} on rank {self.rank}: closed, or not made"
            )
        return shared.group

    def close(self) -> None:
        """Give the groups back; what nobody uses ends. Every rank closes in the same order."""
        for shared in self._mine.values():
            shared.users -= 1
            if shared.users == 0:
                shared.close()
        self._mine = {}

    def abort(self) -> None:
        """End the groups at once, whoever uses them: waits of the peers end with an error."""
        for shared in self._mine.values():
            shared.close()


def default_timeout(device: torch.device) -> timedelta:
    """How long a wait in the default group lasts."""
    world: Any = dist.group.WORLD
    options = world._get_backend(device).options
    return timedelta(seconds=options._timeout.total_seconds())
