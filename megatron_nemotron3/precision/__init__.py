"""NVFP4 training: the published recipe, number formats, emulation on any device, and measured errors."""

from megatron_nemotron3.precision.settings import Emulation, emulating
from megatron_nemotron3.precision.settings import parse as parse_emulation
from megatron_nemotron3.precision.table import bf16_tail

__all__ = ["Emulation", "bf16_tail", "emulating", "parse_emulation"]
