"""Token-by-token generation from a Megatron or a Hugging Face checkpoint.

    weights            checkpoint tensors, laid out for decoding
    batch              the tokens of one forward pass, row by row, and their attention masks
    state              KV caches, Mamba-2 states, and what rolls a pass back
    layers, mamba, moe the layer kinds, each for one token and for many
    engine             `Engine`: chunked prefill, forward passes
    mtp                `MTP`: the multi-token-prediction block, depth by depth
    sampling           logits to probabilities to a token; acceptance of drafted tokens
    prompts            `generate`: prompts to continuations, plain or speculative with MTP as the drafter
    evaluate           held-out loss by MTP depth, acceptance length by number of drafts
    checkpoint_folder  checkpoint, tokenizer and data of a folder
    text               tokenizer, and text that appears while tokens arrive
    command, evaluate_command   `nemotron3 generate`, `nemotron3 evaluate`

Needs torch. Runs without megatron-core and without a process group, on the CPU or one GPU.
"""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint as find_checkpoint
    from megatron_nemotron3.inference.generate.engine import Engine as Engine
    from megatron_nemotron3.inference.generate.evaluate import acceptance as acceptance
    from megatron_nemotron3.inference.generate.evaluate import losses as losses
    from megatron_nemotron3.inference.generate.evaluate import windows as windows
    from megatron_nemotron3.inference.generate.moe import MixtureOfExperts as MixtureOfExperts
    from megatron_nemotron3.inference.generate.mtp import MTP as MTP
    from megatron_nemotron3.inference.generate.prompts import GenerationOptions as GenerationOptions
    from megatron_nemotron3.inference.generate.prompts import generate as generate
    from megatron_nemotron3.inference.generate.sampling import Sampling as Sampling
    from megatron_nemotron3.inference.generate.weights import load as load
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "checkpoint_folder": ["find_checkpoint"],
            "engine": ["Engine"],
            "evaluate": ["acceptance", "losses", "windows"],
            "moe": ["MixtureOfExperts"],
            "mtp": ["MTP"],
            "prompts": ["GenerationOptions", "generate"],
            "sampling": ["Sampling"],
            "weights": ["load"],
        },
    )
