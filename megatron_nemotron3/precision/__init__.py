"""NVFP4 training: the published recipe, number formats, emulation on any device, and measured errors."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.precision.settings import Emulation as Emulation
    from megatron_nemotron3.precision.settings import emulating as emulating
    from megatron_nemotron3.precision.settings import parse_emulation as parse_emulation
    from megatron_nemotron3.precision.table import bf16_tail as bf16_tail
    from megatron_nemotron3.precision.yaml_file import write_precision_file as write_precision_file
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "settings": ["Emulation", "emulating", "parse_emulation"],
            "table": ["bf16_tail"],
            "yaml_file": ["write_precision_file"],
        },
    )
