"""Whether modules can run as one pipeline, and which stage of it each rank is.

A stage is counted from the end of the pipeline: the last stage of every module before a common one has the
same number, however deep the modules are. Upstream counts from the start, which gives a shallow encoder one
warm-up microbatch more than its consumer has room for: 1F1B then waits forever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron_nemotron3.boundary.groups import BoundaryError
from megatron_nemotron3.boundary.layout import Layout

Layouts = Mapping[str, Layout]
#: module -> modules that take its output.
Topology = Mapping[str, Sequence[str]]


def check_modules(
    layouts: Layouts, topology: Topology, world_size: int, frozen: Collection[str] = ()
) -> None:
    """Refuse what would hang later. From the arguments alone, so every rank comes to the same verdict.

    Raises:
        BoundaryError: modules without layout, a cycle, ranks in no module or beyond the world, an edge that
            skips stages, a rank whose modules are at different stages, an encoder and its consumer on one
            rank, or a frozen module that receives from one that is trained.
    """
    for name, destinations in topology.items():
        if unknown := {name, *destinations} - layouts.keys():
            raise BoundaryError(f"modules {sorted(unknown)} have no grid: grids are of {sorted(layouts)}")
    if missing := layouts.keys() - topology.keys():
        raise BoundaryError(
            f"modules {sorted(missing)} are not in the topology: give each a list, if an empty one"
        )
    of: dict[int, list[str]] = {}
    for name, layout in layouts.items():
        for rank in layout.ranks:
            of.setdefault(rank, []).append(name)
    if beyond := sorted(rank for rank in of if rank >= world_size):
        raise BoundaryError(f"ranks {beyond} of the layouts do not exist: the world has {world_size}")
    if idle := sorted(set(range(world_size)) - of.keys()):
        raise BoundaryError(
            f"ranks {idle} of {world_size} are in no module ({_listed(layouts)}): give every rank one, or "
            f"start {len(of)} processes"
        )
    for name, destinations in topology.items():
        for destination in destinations:
            after = {other: remaining(other, layouts, topology) for other in destinations}
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
                    f"{destination} is frozen, {name} before it is not: its gradients need both"
                )
    for rank, names in sorted(of.items()):
        stages = {name: _stage(rank, name, layouts, topology) for name in names}
        if len(set(stages.values())) > 1:
            raise BoundaryError(
                f"rank {rank} is at different stages of the pipeline with its modules {stages}: give modules "
                "that share ranks one pipeline depth"
            )


def remaining(module: str, layouts: Layouts, topology: Topology, above: tuple[str, ...] = ()) -> int:
    """Stages from the first one of a module to the end.

    Raises:
        BoundaryError: a cycle.
    """
    if module in above:
        raise BoundaryError(f"modules feed each other in a circle: {' -> '.join([*above, module])}")
    after = [remaining(name, layouts, topology, (*above, module)) for name in topology.get(module, ())]
    return layouts[module].pp + max(after, default=0)


def stage_of(rank: int, layouts: Layouts, topology: Topology) -> int:
    """The stage of a rank, 0 at the start of the longest path."""
    return next(_stage(rank, name, layouts, topology) for name in layouts if rank in layouts[name].ranks)


def _stage(rank: int, module: str, layouts: Layouts, topology: Topology) -> int:
    total = max(remaining(name, layouts, topology) for name in layouts)
    left = remaining(module, layouts, topology) - layouts[module].coordinates(rank).get("pp", 0)
    return total - left


def _listed(layouts: Layouts) -> str:
    return ", ".join(
        f"{name}: ranks {layout.ranks[0]}-{layout.ranks[-1]}" for name, layout in layouts.items()
    )
