"""Process groups of a single rank on the CPU, in which Megatron can build models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_nemotron3.cpu import cpu_mode


@contextmanager
def world_of_one(seed: int = 1234) -> Iterator[None]:
    """`cpu_mode`, a gloo group of this process, Megatron's groups and random generators."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    assert not dist.is_initialized(), "an earlier test left its process group behind"
    with cpu_mode():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            torch.manual_seed(seed)
            model_parallel_cuda_manual_seed(seed)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
