"""Distillation across tokenizers (X-Token): docs/xtoken.md.

align.py    the teacher's tokens of a batch, and the spans that both tokenizers share
loss.py     P-KL and H-KL of each span, vocabulary- and context-parallel
command.py  `nemotron3 xtoken`

Vocabularies as bytes, the rules of the projection and its file are in `train/teacher/`.
"""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.xtoken.align import Aligner as Aligner
    from megatron_nemotron3.post_training.xtoken.loss import Kind as Kind
    from megatron_nemotron3.post_training.xtoken.loss import span_losses as span_losses
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"align": ["Aligner"], "loss": ["Kind", "span_losses"]})
