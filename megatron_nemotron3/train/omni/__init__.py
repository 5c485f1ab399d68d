"""Nemotron 3 Nano Omni in Megatron's MIMO model: encoders, projectors, and how it is built."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.train.omni.conversation import OmniEncoder as OmniEncoder
    from megatron_nemotron3.train.omni.conversation import join as join
    from megatron_nemotron3.train.omni.data import ChatFile as ChatFile
    from megatron_nemotron3.train.omni.data import build_loader as build_loader
    from megatron_nemotron3.train.omni.data import check as check
    from megatron_nemotron3.train.omni.model import LANGUAGE as LANGUAGE
    from megatron_nemotron3.train.omni.model import SOUND as SOUND
    from megatron_nemotron3.train.omni.model import VISION as VISION
    from megatron_nemotron3.train.omni.model import build as build
    from megatron_nemotron3.train.omni.model import load as load
    from megatron_nemotron3.train.omni.model import prepare as prepare
    from megatron_nemotron3.train.omni.model import save as save
    from megatron_nemotron3.train.omni.processor import load_processor as load_processor
    from megatron_nemotron3.train.omni.processor import make_processor as make_processor
    from megatron_nemotron3.train.omni.processor import omni_tokenizer as omni_tokenizer
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "conversation": ["OmniEncoder", "join"],
            "data": ["ChatFile", "build_loader", "check"],
            "model": ["LANGUAGE", "SOUND", "VISION", "build", "load", "prepare", "save"],
            "processor": ["load_processor", "make_processor", "omni_tokenizer"],
        },
    )
