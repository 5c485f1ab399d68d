"""Checkpoint tensors, laid out for decoding.

All tensors are read under their Hugging Face names, a band of rows at a time; the converter's views give a
Megatron checkpoint these names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.logits.reader import TensorReader
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.inference.generate.layers import (
    MLP,
    Attention,
    DecodeLayer,
    GroupNorm,
    ReadTensor,
    read_norm,
)
from megatron_nemotron3.inference.generate.linear import DecodeLinear
from megatron_nemotron3.inference.generate.mamba import Mamba
from megatron_nemotron3.inference.generate.moe import MixtureOfExperts
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.prefixes import prefixes
from megatron_nemotron3.models.tensors import hf_root

LAYER_KINDS: dict[str, Callable[[ReadTensor, Nemotron3Config], DecodeLayer]] = {
    "M": Mamba,
    "*": Attention,
    "-": MLP,
    "E": MixtureOfExperts,
}


@dataclass(frozen=True)
class MTPBlock:
    """One multi-token-prediction block: h' = norm(layers(eh_proj(cat(enorm(embedding), hnorm(h)))))."""

    enorm: GroupNorm
    hnorm: GroupNorm
    #: From 2 d to d.
    eh_proj: DecodeLinear
    layers: list[DecodeLayer]
    final_norm: GroupNorm

    def project(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings and h_{k-1}, both [tokens, d], to the input of the block's layers."""
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), 1))


@dataclass(frozen=True)
class Weights:
    """A whole model on one device."""

    config: Nemotron3Config
    #: [vocabulary, d].
    embedding: Tensor
    layers: list[DecodeLayer]
    final_norm: GroupNorm
    #: From d to the vocabulary; FP32 on a CPU (`logits`).
    output: DecodeLinear
    #: One block for all depths, or one per depth; empty without MTP.
    mtp: list[MTPBlock]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations, keys and values, and most weights."""
        return self.embedding.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] after a final norm -> [..., vocabulary]: FP32 on a CPU, else in the weights' dtype.

        In BF16 the two best logits of every fortieth step are equal, and the token is an accident.
        """
        rows = hidden.to(self.output.dtype).flatten(0, -2)
        return self.output(rows).view(*hidden.shape[:-1], -1)


def load(
    folder: Path | str,
    config: Nemotron3Config | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mtp: bool = True,
    **options: Any,
) -> Weights:
    """Load a checkpoint folder: Megatron's (torch_dist, fsdp_dtensor) or Hugging Face's.

    Args:
        config: the model; default: what config.json or the arguments in the checkpoint say.
        dtype: dtype of the weights on the device; default: as stored. Routers, expert biases and the small
            tensors of a Mamba-2 mixer are always FP32.
        mtp: also load the MTP block, if there is one.
        options: passed to `checkpoints.convert.checkpoints.open_checkpoint`: iteration, vocab_size,
        dequantize, ….

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it is of another model.
    """
    checkpoint = open_checkpoint(Path(folder), model=config, **options)
    return read_weights(checkpoint.hf_view(), checkpoint.config, device=device, dtype=dtype, mtp=mtp)


def read_weights(
    source: TensorSource,
    config: Nemotron3Config,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mtp: bool = True,
) -> Weights:
    """Load tensors under Hugging Face names from any source. Arguments and errors as for `load`."""
    tensors, target = TensorReader("checkpoint", source), torch.device(device)
    if dtype is None:
        dtype = getattr(torch, source.tensors[tensors.find(f"{hf_root(config)}.embeddings.weight")].dtype)

    def below(prefix: str) -> ReadTensor:
        def read(name: str, *shape: int, float32: bool = False) -> Tensor:
            tensor = tensors.tensor(prefix + name, shape)
            return tensor.to(target, torch.float32 if float32 else dtype)

        return read

    found = assemble(below, config, mtp=mtp)
    return found


def assemble(below: Callable[[str], ReadTensor], config: Nemotron3Config, *, mtp: bool = True) -> Weights:
    """Lay out the tensors of a model for decoding."""
    d, root = config.hidden_size, hf_root(config)
    layers: list[DecodeLayer] = []
    blocks: list[MTPBlock] = []
    stack = layers
    for prefix in list(prefixes(config))[1:]:
        read = below(prefix.hf)
        if prefix.part in LAYER_KINDS:
            if stack is layers or mtp:
                stack.append(LAYER_KINDS[prefix.part](read, prefix.config))
        elif prefix.part == "mtp_in":
            stack = []
            read_input = read
        elif mtp:
            enorm = read_norm(read_input, config, "enorm.weight")
            hnorm = read_norm(read_input, config, "hnorm.weight")
            eh_proj = DecodeLinear(read_input("eh_proj.weight", d, 2 * d))
            final_norm = read_norm(read, config, "final_layernorm.weight")
            blocks.append(MTPBlock(enorm, hnorm, eh_proj, stack, final_norm))
    read = below("")
    head = read("lm_head.weight", config.vocab_size, d)
    return Weights(
        config,
        embedding=read(f"{root}.embeddings.weight", config.vocab_size, d),
        layers=layers,
        final_norm=read_norm(read, config, f"{root}.norm_f.weight"),
        output=DecodeLinear(head.float() if head.device.type == "cpu" else head),
        mtp=blocks,
    )
