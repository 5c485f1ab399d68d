"""Read, verify, write and resume Megatron checkpoint folders without Megatron, and convert them."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.checkpoints.convert.into_model import load_base as load_base
    from megatron_nemotron3.checkpoints.convert.into_model import load_checkpoint as load_checkpoint
    from megatron_nemotron3.checkpoints.convert.omni_config import omni_json as omni_json
    from megatron_nemotron3.checkpoints.convert.quantized import hf_quant_config as hf_quant_config
    from megatron_nemotron3.checkpoints.convert.quantized import quantization as quantization
    from megatron_nemotron3.checkpoints.convert.quantized import read_scales as read_scales
    from megatron_nemotron3.checkpoints.own_loop import resume_checkpoint as resume_checkpoint
    from megatron_nemotron3.checkpoints.own_loop import save_checkpoint as save_checkpoint
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "convert.into_model": ["load_base", "load_checkpoint"],
            "convert.omni_config": ["omni_json"],
            "convert.quantized": ["hf_quant_config", "quantization", "read_scales"],
            "own_loop": ["resume_checkpoint", "save_checkpoint"],
        },
    )
