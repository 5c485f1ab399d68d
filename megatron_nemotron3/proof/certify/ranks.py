"""Call a function on every rank of a small Megatron world on the CPU. Needs torch and megatron-core.

It is a module-level function, because worker processes import it by name; `initialize` inside it makes
Megatron's groups: `first, second = run_distributed(check, 2, 64)`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron_nemotron3.common.ranks import Call, environment_kept, gloo_world, run_ranks

#: What the server imports that ranks are forked from; what these import is not named.
PRELOAD = [
    "megatron_nemotron3.cpu.preload",  # megatron.training
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text",
    "megatron.bridge",
    "megatron_nemotron3.post_training.boost.heads",
    "megatron_nemotron3.train.build",
    "megatron_nemotron3.proof.certify.world",
]

#: Size of a layout -> Megatron's name of it.
_GROUPS = {
    "tp": "tensor_model",
    "pp": "pipeline_model",
    "vpp": "virtual_pipeline_model",
    "cp": "context",
    "ep": "expert_model",
    "etp": "expert_tensor",
}


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, apart: bool = False
) -> list[Any]:
    """Call `function(*args)` on every rank of a gloo world on the CPU; return the ranks' results in order.

    Each rank runs inside `cpu_mode` with torch.distributed initialized; `initialize` makes Megatron's
    groups. Ranks are processes of their own (`common.ranks.run_ranks`); a world of one runs right here and is
    taken down again.

    Args:
        timeout: seconds, imports included; not for a world of one right here.
        apart: a process of its own for a world of one, too. Megatron's DistributedDataParallel is never
            freed, and with it stay some sixty gloo threads, which poll.

    Raises:
        RuntimeError, TimeoutError: as `run_ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        inside = partial(_world, f"file://{folder}/store", timeout)
        if world_size == 1 and not apart:
            with environment_kept():
                be_alone()
                with inside():
                    return [function(*args)]
        return run_ranks(Call(function, args, inside), world_size, timeout=timeout, preload=PRELOAD)


def run_each(function: Callable[..., Any], calls: Sequence[Sequence[Any]], timeout: float = 120) -> list[Any]:
    """Call `function(*args)` for the arguments of each call, at the same time, each in a world of one.

    As `run_distributed(..., apart=True)` of each. An error says "rank N" of call N.

    Raises:
        RuntimeError, TimeoutError: as `run_ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Call(_one_of, (function, calls, folder, timeout))
        return run_ranks(call, len(calls), timeout=timeout, preload=PRELOAD)


def _one_of(function: Callable[..., Any], calls: Sequence[Sequence[Any]], folder: str, timeout: float) -> Any:
    number = be_alone()
    with _world(f"file://{folder}/store{number}", timeout):
        return function(*calls[number])


def be_alone() -> int:
    """Make this process the only rank of a world of its own; return its rank in the one before, if any."""
    number = int(os.environ.get("RANK", "0"))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return number


@contextmanager
def _world(store: str, timeout: float) -> Iterator[None]:
    """Be one rank: CPU mode and process group; afterwards none of it is left."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from megatron_nemotron3.cpu import cpu_mode

    with cpu_mode(), torch.random.fork_rng(devices=[]), gloo_world(store, timeout):
        try:
            yield
            torch.distributed.barrier()  # nobody leaves while another still talks to it
        finally:
            destroy_moe_metrics_tracker()
            parallel_state.destroy_model_parallel()


def initialize(*, seed: int = 1234, optimizer_instances: int = 1, **sizes: int | None) -> None:
    """Make Megatron's process groups (data parallel: what is left) and seed its RNG streams.

    Sequence parallelism is no group: `build_hybrid` turns it on where TP > 1.

    Args:
        sizes: tp, pp, vpp, cp, ep and etp, as in `ParallelLayout`; without one, 1.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    names: dict[str, int | None] = {"expert_tensor_parallel_size": 1}  # Megatron's default is TP
    names |= {f"{_GROUPS[name]}_parallel_size": size for name, size in sizes.items()}
    parallel_state.initialize_model_parallel(**names, num_distributed_optimizer_instances=optimizer_instances)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
