"""The teacher of a launch: its settings, and what is checked of it before a run. Needs no torch.

settings    what NEMOTRON3_DISTILL and the options of a teacher say
check       the teacher's checkpoint, vocabulary and stored logits against the student's options
manifest    what a folder of stored logits is of
data        the rows that a teacher was trained on, or that its logits were stored for
vocabulary  whether two models mean the same tokens by the same ids
tokens      a tokenizer's vocabulary as bytes
rules       which tokens of the teacher a token of the student stands for
projection  the sparse matrix of these weights, and its file
"""

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
