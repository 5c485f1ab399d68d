"""Process groups of a single rank on the CPU, in which Megatron can build models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tests.support.gpu_world import world


@contextmanager
def world_of_one(seed: int = 1234) -> Iterator[None]:
    """`cpu_mode`, a gloo group of this process, Megatron's groups and random generators."""
    assert not dist.is_initialized(), "an earlier test left its process group behind"
    with world("cpu", seed):
        yield


class OneRank:
    """Stands for one rank of a process group."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank
