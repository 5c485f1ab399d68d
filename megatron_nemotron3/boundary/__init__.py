"""Boundary communicators: rows between modules of different parallel layouts, each row sent once.

Data, without torch:

    intervals, layout     sets of rows; the parallel layout of a module
    partition             samples of a data lane, positions of a rank
    plan, planner         who sends which rows to whom; made from layouts and row counts
    bounds, plan_text     lower bounds and traffic of a plan; a plan as text and JSON
    command               `nemotron3 boundary`

Communication:

    feed                  row counts that come with the batch
    groups, grids         process groups, and failing together; those of a module in its own layout
    stages                checks of a topology, pipeline stage of each rank
    agreement             the header where row counts are not known
    exchange, all_to_all  execute plans point to point, or on shared ranks
    edge, coordinator     one edge between two modules; all edges into a module

Upstream's classes over it:

    bridge, multimodule   BridgeCommunicator, MultiModulePipelineCommunicator
    colocated             ColocatedBridgeCommunicator
    mimo                  MimoModel, with placement and decoder_input for its language model's input
    training              a schedule for colocated pipelines, gradient scale
"""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.boundary.feed import RowFeed as RowFeed
    from megatron_nemotron3.boundary.feed import describe_ids as describe_ids
    from megatron_nemotron3.boundary.feed import tokens as tokens
    from megatron_nemotron3.boundary.layout import Layout as Layout
    from megatron_nemotron3.boundary.mimo import BoundaryMimoModel as BoundaryMimoModel
    from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator as BoundaryCommunicator
    from megatron_nemotron3.boundary.partition import sample_shares as sample_shares
    from megatron_nemotron3.boundary.plan_text import explain as explain
    from megatron_nemotron3.boundary.planner import make_plan as make_plan
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "feed": ["RowFeed", "describe_ids", "tokens"],
            "layout": ["Layout"],
            "mimo": ["BoundaryMimoModel"],
            "multimodule": ["BoundaryCommunicator"],
            "partition": ["sample_shares"],
            "plan_text": ["explain"],
            "planner": ["make_plan"],
        },
    )
