"""Train only the MTP heads of a finished model: more of their drafts are accepted (docs/post_training.md)."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.boost.heads import train_heads as train_heads
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"heads": ["train_heads"]})
