"""Boundary communicators: rows between modules of different parallel layouts, each row sent once."""

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
    from megatron_nemotron3.boundary.plan import make_plan as make_plan
    from megatron_nemotron3.boundary.traffic import explain as explain
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "feed": ["RowFeed", "describe_ids", "tokens"],
            "layout": ["Layout"],
            "mimo": ["BoundaryMimoModel"],
            "multimodule": ["BoundaryCommunicator"],
            "partition": ["sample_shares"],
            "plan": ["make_plan"],
            "traffic": ["explain"],
        },
    )
