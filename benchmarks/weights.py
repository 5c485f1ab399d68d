"""The same random weights for every side, generated on the device of the model.

Each tensor is a function of its Hugging Face name, so no weights are sent between processes, and sides that
run at different times hold the same ones. Values are rounded to BF16, so that sides which keep a few
parameters in FP32 hold the same numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: Hugging Face name -> mean and standard deviation; every other tensor is a matrix with 1 / sqrt(inputs).
_SCALES = {
    r"\.dt_bias$": (-3.0, 1.5),
    r"\.A_log$": (1.0, 1.0),
    r"\.conv1d\.(weight|bias)$": (0.0, 0.4),
    r"(\.D|norm\.weight|norm_f\.weight)$": (1.0, 0.1),
    r"embeddings\.weight$": (0.0, 1.0),
}
_BIAS = "e_score_correction_bias"
#: Gap between the expert biases that pin the routing; scores are between 0 and 1.
_PINNED_GAP = 10.0


def megatron_pieces(module: torch.nn.Module, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, part of a tensor) for Megatron's model; expert e of a tensor is "name#e"."""
    from tests.support import model_mapping as mapping

    queries = config.num_attention_heads // config.num_query_groups
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name.endswith("local_tokens_per_expert"):
            continue
        if match := mapping._EXPERT.fullmatch(name):
            layer, fc, expert = match.groups()
            yield f"model.layers.{layer}.mixer.experts.{'up' if fc == '1' else 'down'}_proj#{expert}", tensor
        elif match := mapping._QKV.fullmatch(name):
            blocks = tensor.detach().view(config.num_query_groups, queries + 2, config.kv_channels, -1)
            for part, rows in (("q", blocks[:, :queries]), ("k", blocks[:, -2]), ("v", blocks[:, -1])):
                yield f"model.layers.{match[1]}.mixer.{part}_proj.weight", rows
        else:
            yield mapping._same(name), tensor


def transformers_pieces(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `megatron_pieces`, for transformers' model."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if ".experts." in name:
            for expert, matrix in enumerate(tensor.detach()):
                yield f"{name}#{expert}", matrix
        else:
            yield name, tensor


@torch.no_grad()
def fill(pieces: Iterator[tuple[str, Tensor]], *, pinned: bool = False) -> None:
    """Write the weights of every piece.

    Args:
        pinned: set the router's biases far apart, so that every token of a layer is routed to the same
            experts regardless of rounding; otherwise they are zero.
    """
    for name, target in pieces:
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(name.encode()))
        if name.endswith(_BIAS):
            order = torch.randperm(target.numel(), generator=generator, device=target.device)
            target.copy_(order * _PINNED_GAP if pinned else torch.zeros_like(target))
            continue
        mean, std = spread(name, target.shape[-1])
        value = torch.randn(target.numel(), generator=generator, device=target.device)
        target.copy_(value.mul_(std).add_(mean).bfloat16().view(target.shape))


def spread(name: str, columns: int) -> tuple[float, float]:
    """Mean and standard deviation of a tensor with that Hugging Face name."""
    fixed = (scale for pattern, scale in _SCALES.items() if re.search(pattern, name))
    return next(fixed, (0.0, columns**-0.5))
