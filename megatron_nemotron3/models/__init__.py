"""The models: numbers and layer patterns. Cheap to import: no libraries."""

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
from megatron_nemotron3.models.parameters import ParameterCount, count, stored_tensors
from megatron_nemotron3.models.tiny import tiny

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
    "Nemotron3Config",
    "ParameterCount",
    "count",
    "get",
    "identify",
    "named",
    "names",
    "stored_tensors",
    "tiny",
]
