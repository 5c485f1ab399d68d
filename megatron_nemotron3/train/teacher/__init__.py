"""The teacher of a launch: its settings, vocabulary and stored logits, checked before a run without torch."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.train.teacher.projection import Projection as Projection
    from megatron_nemotron3.train.teacher.projection import read_for as read_for
    from megatron_nemotron3.train.teacher.settings import Distillation as Distillation
    from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary as ByteVocabulary
    from megatron_nemotron3.train.teacher.vocabulary import find as find
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "projection": ["Projection", "read_for"],
            "settings": ["Distillation"],
            "vocabulary": ["ByteVocabulary", "find"],
        },
    )
