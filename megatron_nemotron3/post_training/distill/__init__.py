"""Distillation of a student from a teacher of the family (docs/post_training.md)."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.distill.attach import distilling as distilling
    from megatron_nemotron3.post_training.distill.divergences import divergence as divergence
    from megatron_nemotron3.post_training.distill.topk import draw_quantiles as draw_quantiles
    from megatron_nemotron3.post_training.distill.topk import most_probable as most_probable
    from megatron_nemotron3.post_training.distill.topk import topk_divergence as topk_divergence
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "attach": ["distilling"],
            "divergences": ["divergence"],
            "topk": ["draw_quantiles", "most_probable", "topk_divergence"],
        },
    )
