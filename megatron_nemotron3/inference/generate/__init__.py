"""Token-by-token generation from a Megatron or a Hugging Face checkpoint.

Runs without megatron-core and without a process group, on the CPU or one GPU.
"""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint as find_checkpoint
    from megatron_nemotron3.inference.generate.decode import Decode as Decode
    from megatron_nemotron3.inference.generate.decode import load as load
    from megatron_nemotron3.inference.generate.engine import Engine as Engine
    from megatron_nemotron3.inference.generate.evaluate import acceptance as acceptance
    from megatron_nemotron3.inference.generate.evaluate import losses as losses
    from megatron_nemotron3.inference.generate.evaluate import windows as windows
    from megatron_nemotron3.inference.generate.mtp import MTP as MTP
    from megatron_nemotron3.inference.generate.prompts import GenerationOptions as GenerationOptions
    from megatron_nemotron3.inference.generate.prompts import generate as generate
    from megatron_nemotron3.inference.generate.sampling import Sampling as Sampling
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "checkpoint_folder": ["find_checkpoint"],
            "engine": ["Engine"],
            "evaluate": ["acceptance", "losses", "windows"],
            "decode": ["Decode", "load"],
            "mtp": ["MTP"],
            "prompts": ["GenerationOptions", "generate"],
            "sampling": ["Sampling"],
        },
    )
