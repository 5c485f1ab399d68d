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
