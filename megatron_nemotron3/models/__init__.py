"""The models: numbers and layer patterns. Cheap to import: no libraries; `Definition` loads torch on use."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy
from megatron_nemotron3.models.catalog import (
    LIGHTNING,
    NANO,
    NANO_4B,
    NANO_9B_V2,
    NANO_12B_V2,
    NEMOTRON_H_4B,
    NEMOTRON_H_8B,
    NEMOTRON_H_47B,
    NEMOTRON_H_56B,
    PUZZLE,
    SUPER,
    ULTRA,
    get,
    identify,
    named,
    names,
)
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.lora import LoRASettings, adding_lora
from megatron_nemotron3.models.omni import OmniConfig, get_omni
from megatron_nemotron3.models.parameters import ParameterCount, count, stored_tensors
from megatron_nemotron3.models.tiny import tiny

if TYPE_CHECKING:
    from megatron_nemotron3.models.definition import Definition as Definition
else:
    __getattr__, *_ = lazy(__name__, {"definition": ["Definition"]})

__all__ = [
    "LIGHTNING",
    "NANO",
    "NANO_4B",
    "NANO_9B_V2",
    "NANO_12B_V2",
    "NEMOTRON_H_4B",
    "NEMOTRON_H_8B",
    "NEMOTRON_H_47B",
    "NEMOTRON_H_56B",
    "PUZZLE",
    "SUPER",
    "ULTRA",
    "Definition",
    "LoRASettings",
    "Nemotron3Config",
    "OmniConfig",
    "ParameterCount",
    "adding_lora",
    "count",
    "get",
    "get_omni",
    "identify",
    "named",
    "names",
    "stored_tensors",
    "tiny",
]
