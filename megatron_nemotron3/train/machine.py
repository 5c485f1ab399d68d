"""Whether this machine has memory and cores for the ranks of a training run."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_nemotron3.launch import Launch
from megatron_nemotron3.launch.plan.memory import memory

#: Bytes of one process that has imported torch and Megatron 0.19 (measured, CPU).
PROCESS = int(0.7 * 2**30)
_GIB = 2**30
#: (limit, usage) of the control group, version 2 and 1.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def cores() -> int:
    """Number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that new processes can use, by machine and control group."""
    import psutil

    found = [psutil.virtual_memory().available]
    for limit, usage in _GROUPS:
        try:
            found.append(int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):  # "max": no limit
            continue
    return max(0, min(found))


def needed_memory(launch: Launch) -> int:
    """Bytes of all ranks on a CPU: Megatron itself, weights, optimizer, activations."""
    layout = launch.layout
    stage_ranks = layout.world_size // layout.pp
    return sum(stage_ranks * (PROCESS + memory(launch, stage).total) for stage in range(layout.pp))


def shortages(launch: Launch) -> list[str]:
    """Return a sentence for each of cores and memory that all ranks together exceed on this machine's CPU."""
    ranks, have, found = launch.layout.world_size, cores(), []
    if ranks > have:
        found.append(f"{ranks} ranks share {have} cores: each rank gets {have / ranks:.2f} of a core at most")
    free, need = free_memory(), needed_memory(launch)
    if need > free:
        found.append(
            f"{ranks} ranks need about {need / _GIB:.1f} GiB of memory ({PROCESS / _GIB:.1f} GiB each for "
            f"Megatron itself), and {free / _GIB:.1f} GiB are free: use fewer ranks, a smaller model or batch"
        )
    return found
