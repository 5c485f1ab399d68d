"""When a boundary exchange fails on one rank, it fails on all, with the same words, and nobody hangs.

A rank that finds something wrong writes the reason to the store of the process group and tears its boundary
groups down; waits of its peers then end with a communication error, and they look the reason up, fail and
tear down in turn. A rank that died leaves no reason: those who notice write down what each was waiting for.
The first reason written is everybody's.

On gloo a wait ends when the peer's connection does. NCCL does not notice that a peer has gone: there the
watchdog of torch.distributed ends the process at the group's timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING), and
the reason stands in the log of the rank that failed.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist

#: Seconds to collect what ranks were waiting for, when none has written a reason.
PATIENCE = 0.5
_numbers: dict[str, itertools.count[int]] = defaultdict(itertools.count)


class BoundaryError(RuntimeError):
    """An exchange between modules failed. Every rank of the communicator raises it with the same text."""


class Failure:
    """The common end of the ranks of one communicator.

    Constructed on every rank, in one order: communicators of the same ranks are told apart by their number.

    Args:
        ranks: of the communicator.
        abort: ends this rank's process groups (`Groups.abort`).
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
        """Whether this rank has raised."""
        return self._reason is not None

    def check(self) -> None:
        """Raise again what this communicator failed of.

        Raises:
            BoundaryError: it has failed.
        """
        if self._reason is not None:
            raise BoundaryError(self._reason)

    def fail(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Fail everywhere, of this reason or of the one another rank has written before.

        Raises:
            BoundaryError: always.
        """
        self._reason = self._agree(f"rank {self.rank}: {reason}")
        self._abort()
        raise BoundaryError(self._reason) from cause

    @contextmanager
    def guarded(self, doing: Callable[[], str]) -> Iterator[None]:
        """Whatever goes wrong in the block becomes a BoundaryError on every rank.

        Args:
            doing: what this rank is waiting for, with numbers; called only if it fails.

        Raises:
            BoundaryError: as `fail`.
        """
        self.check()
        try:
            yield
        except BoundaryError:
            raise
        except Exception as error:
            # The frames below hold process groups, and those the connections on which peers wait.
            traceback.clear_frames(error.__traceback__)
            self._reason = self._written() or self._agree(self._claims(doing(), error))
            self._abort()
            raise BoundaryError(self._reason) from error

    def _claims(self, mine: str, error: Exception) -> str:
        """What the ranks were waiting for; those that say nothing within PATIENCE may be dead."""
        words = str(error).strip().splitlines()
        text = f"{mine} ({type(error).__name__}: {words[0][:160] if words else 'no message'})"
        try:
            store = _store()
            store.set(f"{self._key}/{self.rank}", mine)
            time.sleep(PATIENCE)
            others = [
                rank for rank in self.ranks if store.check([f"{self._key}/{rank}"]) and rank != self.rank
            ]
            heard = [f"rank {rank}: {store.get(f'{self._key}/{rank}').decode()}" for rank in others[:8]]
            silent = sorted(set(self.ranks) - {self.rank, *others})
        except RuntimeError:  # the store ended with its host
            heard, silent = [], []
        lines = [f"rank {self.rank}: {text}", *heard]
        if silent:
            lines.append(f"ranks {silent} say nothing: look for their first error")
        lines.append("cure: give both sides the same batches; if a rank died, its own log has the cause")
        return "\n".join(lines)

    def _written(self) -> str | None:
        try:
            return _store().get(self._key).decode() if _store().check([self._key]) else None
        except RuntimeError:
            return None

    def _agree(self, reason: str) -> str:
        """The first reason that any rank wrote."""
        try:
            return str(_store().compare_set(self._key, "", reason).decode())
        except RuntimeError:  # the store ended with its host
            return reason


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
