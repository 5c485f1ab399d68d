"""The teacher of a launch: its settings, and what is checked of it before a run. Needs no torch."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.train.teacher.projection import Projection as Projection
    from megatron_nemotron3.train.teacher.projection import read_for as read_for
    from megatron_nemotron3.train.teacher.settings import Distillation as Distillation
    from megatron_nemotron3.train.teacher.tokens import ByteVocabulary as ByteVocabulary
    from megatron_nemotron3.train.teacher.tokens import find as find
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "projection": ["Projection", "read_for"],
            "settings": ["Distillation"],
            "tokens": ["ByteVocabulary", "find"],
        },
    )
