"""One rank's error ends the waits of all ranks of a communicator.

A rank that finds an error raises it and aborts its boundary groups. The waits of its peers then end with a
communication error, which becomes a `BoundaryError`, too.

On gloo a wait ends when the peer's connection closes. NCCL does not notice that a peer is gone: there the
watchdog of torch.distributed ends the process at the group's timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist

CURE = (
    "cure: the log of the rank that failed or ended first has the reason; if there is none, give both sides "
    "the same batches"
)


class BoundaryError(RuntimeError):
    """An exchange between modules failed. Every rank raises one; that of the first has the reason."""


class Failure:
    """The error of one communicator on this rank.

    abort: destroys this rank's process groups (`Groups.abort`).
    cure: last line of the message where this rank does not know the reason.
    """

    def __init__(self, abort: Callable[[], None], cure: str = CURE) -> None:
        self.rank = dist.get_rank()
        self._abort = abort
        self._cure = cure
        self._reason: str | None = None

    @property
    def failed(self) -> bool:
        return self._reason is not None

    def check(self) -> None:
        if self._reason is not None:
            raise BoundaryError(self._reason)

    def fail(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Raise an error that this rank has found, and end the waits of the others."""
        self._reason = f"rank {self.rank}: {reason}"
        self._abort()
        raise BoundaryError(self._reason) from cause

    @contextmanager
    def guarded(self, doing: Callable[[], str]) -> Iterator[None]:
        """Turn any error in the block into a BoundaryError, and end the waits of the other ranks."""
        self.check()
        try:
            yield
        except BoundaryError:
            raise
        except Exception as error:
            # The frames of the traceback hold process groups, whose connections keep the peers waiting.
            traceback.clear_frames(error.__traceback__)
            lines = str(error).strip().splitlines()
            first = lines[0][:160] if lines else "no message"
            self.fail(f"{doing()} ({type(error).__name__}: {first})\n{self._cure}", error)


def by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Value -> the ranks that have it."""
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups
