"""Process groups of a communicator, grids of a module, and how one rank's error ends the waits of all ranks.

`torch.distributed.new_group` is collective over the world, so every rank constructs every `Groups` in the
same order, including those it is not a member of. Do not keep references to a group: they would keep a failed
rank's connections open and its peers waiting.

A rank that finds an error raises it and aborts its groups. The waits of its peers then end with a
communication error, which becomes a `BoundaryError`, too. On gloo a wait ends when the peer's connection
closes. NCCL does not notice that a peer is gone: there the watchdog of torch.distributed ends the process at
the group's timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING).
"""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from megatron_nemotron3.boundary.layout import Layout

if TYPE_CHECKING:  # a refit imports this file, and must not import Megatron before `cpu_mode`
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.process_groups_config import ProcessGroupCollection


class _Shared:
    """A process group with a reference count."""

    def __init__(self, group: Any) -> None:
        self.group = group  # None: closed, or this rank is not a member
        self.users = 0

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


#: Default group -> (ranks, backend, timeout) -> group. A new `init_process_group` starts with no groups.
_SHARED: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Shared]] = weakref.WeakKeyDictionary()


class Groups:
    """The process groups of one communicator.

    ranks: all ranks that exchange rows.
    gathers: the ranks of each group that gathers rows (`Plan.gathers`), ascending as torch numbers them.
    backend, timeout: None: those of the default group.
    own: share no group with other communicators.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        gathers: Collection[Sequence[int]] = (),
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        own: bool = False,
    ) -> None:
        self.rank = dist.get_rank()
        self._registry = {} if own else _SHARED.setdefault(dist.group.WORLD, {})
        self.ranks = tuple(sorted(set(ranks)))
        configuration = str(dist.get_backend_config() if backend is None else backend)
        on_cuda = "nccl" in configuration and torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        #: Whether a message is received only by a receive with its tag. NCCL ignores tags.
        self.tagged = _has_tags(configuration)
        default: Any = dist.group.WORLD
        self.timeout = timeout or timedelta(
            seconds=default._get_backend(self.device).options._timeout.total_seconds()
        )
        for group in gathers:
            if list(group) != sorted(group):
                raise ValueError(f"ranks {group} of a group: give them in ascending order")
        others = {tuple(group) for group in gathers if len(group) > 1} - {self.ranks}
        self._groups = {group: self._get(group, backend) for group in (self.ranks, *sorted(others))}
        #: On the CPU, to compare descriptions without waiting for a device.
        self._comparing = None if self.tagged else self._get(self.ranks, "gloo")
        for group, shared in self._groups.items():
            if self.rank in group and shared.users == 1:
                # NCCL creates its communicator here, and gloo ensures that every member has connected.
                dist.all_reduce(torch.zeros(1, device=self.device), group=shared.group)

    def _get(self, ranks: tuple[int, ...], backend: str | None) -> _Shared:
        key = ranks, backend, self.timeout
        shared = self._registry.get(key)
        if shared is None or shared.users == 0:
            group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
            shared = self._registry[key] = _Shared(group if self.rank in ranks else None)
        shared.users += 1
        return shared

    @property
    def is_member(self) -> bool:
        return self.rank in self.ranks

    @property
    def group(self) -> Any:
        return self.gather(self.ranks)

    def gather(self, ranks: Sequence[int]) -> Any:
        shared = self._groups.get(tuple(ranks))
        if shared is None or shared.group is None:
            raise RuntimeError(
                f"no process group of ranks {list(ranks)} on rank {self.rank}: closed, or not made"
            )
        return shared.group

    def start_comparing(self, numbers: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """Start to gather numbers: the handle, and the buffer [ranks, numbers] that it fills."""
        assert self._comparing is not None
        gathered = torch.empty(len(self.ranks), len(numbers), dtype=torch.int64)
        own, group = torch.tensor(numbers, dtype=torch.int64), self._comparing.group
        work = dist.all_gather_into_tensor(gathered.view(-1), own, group=group, async_op=True)
        return work, gathered

    def _all(self) -> list[_Shared]:
        return [*self._groups.values(), *([self._comparing] if self._comparing else [])]

    def close(self) -> None:
        """Release the groups; unused ones are destroyed. Every rank closes in the same order."""
        for shared in self._all():
            shared.users -= 1
            if shared.users == 0:
                shared.close()
        self._groups, self._comparing = {}, None

    def abort(self) -> None:
        """Destroy the groups at once, even if shared, so that waits of the peers end with an error."""
        for shared in self._all():
            shared.close()


def _has_tags(configuration: str) -> bool:
    """Whether the backend that moves rows ("nccl", "cpu:gloo,cuda:nccl") matches messages by their tags."""
    return "nccl" not in configuration or not torch.cuda.is_available()


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


#: Dimensions of the view "expert" over which experts are copied.
EXPERT_COPIES = "expt_dp expt_lanes"


def grid(layout: Layout, ep: int = 1, etp: int = 1) -> HyperCommGrid:
    """Return upstream's grid of a module with the groups that models and optimizers need.

    Every rank must call it, for all modules in the same order.
    """
    from megatron.core.hyper_comm_grid import HyperCommGrid

    sizes = {name: layout.size_of(name) for name in (*dict(layout.dimensions), "tp", "cp", "pp", "dp")}
    names = list(sizes)
    made = HyperCommGrid(list(sizes.values()), names, rank_offset=layout.offset)
    # Neighboring ranks of a stage, among which experts are divided.
    inner = layout.size
    if layout.pp > 1:
        inner = math.prod(sizes[name] for name in names[: names.index("pp")])
    if inner % (ep * etp):
        cure = (
            ", or let the stages vary slowest (order=tp-cp-dp-pp)" if inner < layout.size // layout.pp else ""
        )
        raise ValueError(
            f"layout {layout}: EP {ep} x ETP {etp} do not divide the {inner} neighboring ranks of a stage: "
            f"use sizes that do{cure}"
        )
    expert = {"expt_tp": etp, "ep": ep, "expt_dp": inner // (ep * etp), "pp": layout.pp}
    expert["expt_lanes"] = layout.size // layout.pp // inner  # more copies, outside the stages
    made.register_view("expert", list(expert.values()), list(expert), shared_dims=["pp"])
    for dims in ("tp", "cp", "pp", "dp", "dp cp", "tp cp", "tp pp", "tp cp dp", "tp cp dp pp"):
        made.create_pg(dims.split())
    for dims in ("ep", "expt_tp", EXPERT_COPIES, "expt_tp ep", "expt_tp ep pp"):
        made.create_pg(dims.split(), view="expert")
    if expert["expt_lanes"] == 1:  # upstream's optimizer needs it
        made.create_pg(["expt_dp"], view="expert")
    return made


def groups(of: HyperCommGrid) -> ProcessGroupCollection:
    """Return this rank's groups of a grid, as Megatron's modules expect them."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    dense = {"tp_cp": "tp cp", "dp_cp": "dp cp", "mp": "tp pp", "tp_dp_cp": "tp cp dp"}
    dense |= {"intra_dp_cp": "dp cp", "dp_cp_gtp_remat": "dp cp", "intra_dist_opt": "tp cp dp pp"}
    expert = {"tp_ep": "expt_tp ep", "tp_ep_pp": "expt_tp ep pp"}
    expert |= {"expt_dp": EXPERT_COPIES, "intra_expt_dp": EXPERT_COPIES}
    found = {name: of.get_pg(dims.split()) for name, dims in dense.items()}
    found |= {name: of.get_pg(name) for name in ("tp", "cp", "pp", "dp")}
    found |= {name: of.get_pg(dims.split(), view="expert") for name, dims in expert.items()}
    found |= {name: of.get_pg(name, view="expert") for name in ("ep", "expt_tp")}
    return ProcessGroupCollection(**found, embd=None, pos_embd=None)
