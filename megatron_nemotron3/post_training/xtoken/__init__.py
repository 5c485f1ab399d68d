"""Distillation across tokenizers (X-Token): docs/post_training.md."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.xtoken.align import Aligner as Aligner
    from megatron_nemotron3.post_training.xtoken.loss import Kind as Kind
    from megatron_nemotron3.post_training.xtoken.loss import SpanLoss as SpanLoss
    from megatron_nemotron3.post_training.xtoken.loss import span_losses as span_losses
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__, {"align": ["Aligner"], "loss": ["Kind", "SpanLoss", "span_losses"]}
    )
