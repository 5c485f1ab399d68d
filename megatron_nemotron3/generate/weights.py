"""A checkpoint's tensors, laid out for decoding.

Everything is read under its Hugging Face name, a band of rows at a time; the converter's views give a
Megatron checkpoint those names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.convert.checkpoints import open_checkpoint
from megatron_nemotron3.convert.keys import prefixes
from megatron_nemotron3.convert.logits.reader import FileSource, TensorReader
from megatron_nemotron3.generate.attention import Attention
from megatron_nemotron3.generate.layers import Layer, Norm, Read, norm, transposed
from megatron_nemotron3.generate.mamba import Mamba
from megatron_nemotron3.generate.mlp import MLP
from megatron_nemotron3.generate.moe import MixtureOfExperts
from megatron_nemotron3.models import Nemotron3Config

KINDS: dict[str, Callable[[Read, Nemotron3Config], Layer]] = {
    "M": Mamba,
    "*": Attention,
    "-": MLP,
    "E": MixtureOfExperts,
}


@dataclass(frozen=True)
class MTPBlock:
    """One multi-token-prediction block: h' = norm(layers(eh_proj(cat(enorm(embedding), hnorm(h)))))."""

    enorm: Norm
    hnorm: Norm
    #: [2 d, d]: transposed.
    eh_proj: Tensor
    layers: list[Layer]
    final_norm: Norm


@dataclass(frozen=True)
class Weights:
    """A whole model on one device."""

    config: Nemotron3Config
    #: [vocabulary, d].
    embedding: Tensor
    layers: list[Layer]
    final_norm: Norm
    #: [d, vocabulary]: transposed.
    output: Tensor
    #: One physical block for all depths, or one a depth; empty without MTP.
    mtp: list[MTPBlock]

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, keys and values, and most weights."""
        return self.embedding.dtype


def load(
    folder: Path | str,
    config: Nemotron3Config | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mtp: bool = True,
    **options: Any,
) -> Weights:
    """The weights of a checkpoint folder, Megatron's (torch_dist, fsdp_dtensor, mp_rank) or Hugging Face's.

    Args:
        config: the model; default: what config.json or the arguments in the checkpoint say.
        dtype: of the weights on the device; default: as stored. Routers, expert biases and the small tensors
            of a Mamba-2 mixer are FP32 in any case.
        mtp: also the MTP block, if there is one.
        options: of `convert.checkpoints.open_checkpoint`: iteration, vocab_size, dequantize, ….

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it is not this model.
    """
    checkpoint = open_checkpoint(Path(folder), model=config, **options)
    return read(checkpoint.hf_view(), checkpoint.config, device=device, dtype=dtype, mtp=mtp)


def read(
    source: FileSource,
    config: Nemotron3Config,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mtp: bool = True,
) -> Weights:
    """The weights of a source of tensors under Hugging Face names. Arguments and errors as `load`."""
    tensors, target, d = TensorReader("checkpoint", source), torch.device(device), config.hidden_size
    if dtype is None:
        dtype = getattr(torch, source.tensors[tensors.find("backbone.embeddings.weight")].dtype)

    def within(prefix: str) -> Read:
        def get(name: str, *shape: int, float32: bool = False) -> Tensor:
            tensor = tensors.tensor(prefix + name, shape)
            return tensor.to(target, torch.float32 if float32 else dtype)

        return get

    layers: list[Layer] = []
    blocks: list[MTPBlock] = []
    stack = layers
    for place in list(prefixes(config))[1:]:
        inside = within(place.hf)
        if place.part in KINDS:
            if stack is layers or mtp:
                stack.append(KINDS[place.part](inside, config))
        elif place.part == "mtp_in":
            stack = []
            enter = inside
        elif mtp:
            enorm, hnorm = norm(enter, config, "enorm.weight"), norm(enter, config, "hnorm.weight")
            eh_proj = transposed(enter("eh_proj.weight", d, 2 * d))
            final = norm(inside, config, "final_layernorm.weight")
            blocks.append(MTPBlock(enorm, hnorm, eh_proj, stack, final))
    model = within("")
    return Weights(
        config,
        embedding=model("backbone.embeddings.weight", config.vocab_size, d),
        layers=layers,
        final_norm=norm(model, config, "backbone.norm_f.weight"),
        output=transposed(model("lm_head.weight", config.vocab_size, d)),
        mtp=blocks,
    )
