"""Checks that modules can run as one pipeline, and the pipeline stage of each rank.

Stages are counted from the end of the pipeline: the last stages of all modules that feed the same module have
the same number, whatever the depth of the modules. Upstream counts from the start, which gives a shallow
encoder one warm-up microbatch more than the next module can take, and 1F1B hangs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron_nemotron3.boundary.failure import BoundaryError
from megatron_nemotron3.boundary.layout import Layout

Layouts = Mapping[str, Layout]
#: module -> modules that receive its output.
Topology = Mapping[str, Sequence[str]]


def check_modules(
    layouts: Layouts, topology: Topology, world_size: int, frozen: Collection[str] = ()
) -> None:
    """Refuse modules that would hang later. All ranks raise the same error."""
    for name, destinations in topology.items():
        if unknown := {name, *destinations} - layouts.keys():
            raise BoundaryError(f"modules {sorted(unknown)} have no grid, only {sorted(layouts)} have")
    if missing := layouts.keys() - topology.keys():
        raise BoundaryError(
            f"modules {sorted(missing)} are not in the topology: add a list for each, possibly empty"
        )
    modules_of: dict[int, list[str]] = {}
    for name, layout in layouts.items():
        for rank in layout.ranks:
            modules_of.setdefault(rank, []).append(name)
    if beyond := sorted(rank for rank in modules_of if rank >= world_size):
        raise BoundaryError(f"ranks {beyond} of the layouts do not exist: the world has {world_size}")
    for name, destinations in topology.items():
        after = {other: remaining(other, layouts, topology) for other in destinations}
        for destination in destinations:
            if after[destination] < max(after.values()):
                raise BoundaryError(
                    f"{name} feeds modules at different distances from the end {after}: the schedule has one "
                    "stage for each rank; pass what the later one needs through the earlier one"
                )
            if shared := set(layouts[name].ranks) & set(layouts[destination].ranks):
                raise BoundaryError(
                    f"{name} and {destination} share ranks {sorted(shared)}: modules on the same ranks are "
                    "colocated, use BoundaryMimoModel; or give them disjoint ranks"
                )
            if destination in frozen and name not in frozen:
                raise BoundaryError(
                    f"{destination} is frozen, but {name} before it is trained: freeze both, or train both"
                )
    for rank, names in sorted(modules_of.items()):
        stages = {name: _module_stage(rank, name, layouts, topology) for name in names}
        if len(set(stages.values())) > 1:
            raise BoundaryError(
                f"rank {rank} is at different stages of the pipeline with its modules {stages}: give modules "
                "that share ranks one pipeline depth"
            )


def remaining(module: str, layouts: Layouts, topology: Topology, above: tuple[str, ...] = ()) -> int:
    """Number of stages from the first one of a module to the end of the pipeline."""
    if module in above:
        raise BoundaryError(f"modules feed each other in a circle: {' -> '.join([*above, module])}")
    after = [remaining(name, layouts, topology, (*above, module)) for name in topology.get(module, ())]
    return layouts[module].pp + max(after, default=0)


def stage_of(rank: int, layouts: Layouts, topology: Topology) -> int:
    """Pipeline stage of a rank; 0 is the start of the longest path, and of a rank in no module."""
    stages = (_module_stage(rank, name, layouts, topology) for name in layouts if rank in layouts[name].ranks)
    return next(stages, 0)


def _module_stage(rank: int, module: str, layouts: Layouts, topology: Topology) -> int:
    total = max(remaining(name, layouts, topology) for name in layouts)
    left = remaining(module, layouts, topology) - layouts[module].coordinates(rank).get("pp", 0)
    return total - left
