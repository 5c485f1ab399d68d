"""The tensors of a model's Megatron checkpoint, as the converter's mappings have them."""

from __future__ import annotations

from typing import Any

from megatron_nemotron3.checkpoints.convert.inventory import Tensor, mappings
from megatron_nemotron3.models import Nemotron3Config


def megatron_tensors(config: Nemotron3Config, **options: Any) -> list[Tensor]:
    """List every weight, in global shapes.

    `dialect="parameter"`: every parameter and buffer of a model on one rank. Other options are those of
    `mappings`.
    """
    return [tensor for mapping in mappings(config, **options) for tensor in mapping.megatron]
