"""Upstream's grids and process groups of a module in a layout of its own."""

from __future__ import annotations

import math

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_nemotron3.boundary.layout import Layout

#: Dimensions of the view "expert" over which experts are copied.
EXPERT_COPIES = "expt_dp expt_lanes"


def grid(layout: Layout, ep: int = 1, etp: int = 1) -> HyperCommGrid:
    """Return upstream's grid of a module with the groups that models and optimizers need.

    Every rank must call it, for all modules in the same order.
    """
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
    dense = {"tp_cp": "tp cp", "dp_cp": "dp cp", "mp": "tp pp", "tp_dp_cp": "tp cp dp"}
    dense |= {"intra_dp_cp": "dp cp", "dp_cp_gtp_remat": "dp cp", "intra_dist_opt": "tp cp dp pp"}
    expert = {"tp_ep": "expt_tp ep", "tp_ep_pp": "expt_tp ep pp"}
    expert |= {"expt_dp": EXPERT_COPIES, "intra_expt_dp": EXPERT_COPIES}
    found = {name: of.get_pg(dims.split()) for name, dims in dense.items()}
    found |= {name: of.get_pg(name) for name in ("tp", "cp", "pp", "dp")}
    found |= {name: of.get_pg(dims.split(), view="expert") for name, dims in expert.items()}
    found |= {name: of.get_pg(name, view="expert") for name in ("ep", "expt_tp")}
    return ProcessGroupCollection(**found, embd=None, pos_embd=None)
