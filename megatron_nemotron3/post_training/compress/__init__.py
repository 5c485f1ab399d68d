"""Pruning: what matters least in a model, and what is left without it (docs/post_training.md)."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.compress.candidates import search as search
    from megatron_nemotron3.post_training.compress.cut import load as load
    from megatron_nemotron3.post_training.compress.cut import prune as prune
    from megatron_nemotron3.post_training.compress.cut import save as save
    from megatron_nemotron3.post_training.compress.importance import measure as measure
    from megatron_nemotron3.post_training.compress.scores import ScoredLosses as ScoredLosses
    from megatron_nemotron3.post_training.compress.scores import Scores as Scores
    from megatron_nemotron3.post_training.compress.sizes import Sizes as Sizes
    from megatron_nemotron3.post_training.compress.sizes import candidate_config as candidate_config
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "candidates": ["search"],
            "cut": ["load", "prune", "save"],
            "importance": ["measure"],
            "scores": ["ScoredLosses", "Scores"],
            "sizes": ["Sizes", "candidate_config"],
        },
    )
