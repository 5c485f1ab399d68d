"""Train only the MTP heads of a finished model, so that more of their drafts are accepted (docs/boost.md).

trunk       the frozen model: no gradient, and its hidden states from a cache
heads       the loss of the heads, and the mixing of their hidden states
command, inputs, measure   `nemotron3 boost`

What is trained for, as NEMOTRON3_BOOST says it, is in `launch/boosting.py`.
"""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.boost.heads import train_heads as train_heads
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"heads": ["train_heads"]})
